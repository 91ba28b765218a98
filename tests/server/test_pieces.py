"""Large answers: JSON in pieces, made beside the event loop."""

import json
import threading

import pytest

from lean.server import pieces as module
from lean.server.choice import Choice
from lean.server.frames import Frames
from lean.server.pieces import AT_ONCE, BLOCK, encode, in_blocks, pieces

ENTRY = {"token": "é\u2028", "logprob": -0.5, "bytes": [1, 2], "top_logprobs": [{"token": "a"}] * 3}


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        None,
        "text",
        {"a": {}, "b": [], "c": {"d": None}},
        *({"content": [ENTRY] * count, "refusal": None} for count in (1, AT_ONCE, AT_ONCE + 1, 5 * AT_ONCE)),
        list(range(3 * AT_ONCE + 1)),
    ],
    ids=lambda value: f"{type(value).__name__} {len(json.dumps(value))}",
)
def test_the_pieces_are_the_json_of_the_value(value):
    data = b"".join(pieces(value))
    assert data == encode(value)
    assert json.loads(data) == value


def test_no_call_of_the_encoder_takes_more_than_some_entries(monkeypatch):
    sizes = []

    def noted(value):
        sizes.append(len(value) if isinstance(value, list) else 1)
        return encode(value)

    monkeypatch.setattr(module, "encode", noted)
    list(pieces({"logprobs": {"content": [ENTRY] * 1000, "tokens": list(range(1000))}}))
    assert max(sizes) == AT_ONCE


def test_blocks_hold_the_same_bytes():
    parts = [bytes([index]) * 1000 for index in range(250)] * 3
    blocks = in_blocks(parts)
    assert b"".join(blocks) == b"".join(parts)
    assert [BLOCK <= len(block) < BLOCK + 1000 for block in blocks] == [True] * (len(blocks) - 1) + [False]
    assert len(blocks) > 2


@pytest.fixture
def threads(monkeypatch):
    """The threads in which choices of whole answers, and frames of streams, are made."""
    found = []

    def noted(kind, name):
        function = getattr(kind, name)

        def call(*arguments):
            found.append(threading.current_thread().name.rsplit("_", 1)[0])
            return function(*arguments)

        monkeypatch.setattr(kind, name, call)

    noted(Choice, "whole")
    noted(Frames, "piece")
    return found


@pytest.mark.parametrize("fields", [{"logprobs": 2}, {"prompt_logprobs": 1}, {"logprobs": 0, "echo": True}], ids=str)
def test_a_whole_answer_with_log_probabilities_is_made_beside_the_event_loop(server, threads, fields):
    assert server.complete("hello", max_tokens=3, temperature=0, ignore_eos=True, **fields).status_code == 200
    assert threads == ["lean-encode"]


def test_the_log_probabilities_of_an_echoed_prompt_are_made_beside_the_event_loop(server, threads):
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True, "echo": True, "logprobs": 1}
    streamed = server.events("/v1/completions", body)
    assert threads[0] == "lean-encode"
    assert "lean-encode" not in threads[1:]
    report = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert [token for one in streamed for token in one["choices"][0]["logprobs"]["tokens"]] == report["tokens"]


def test_an_answer_of_several_blocks_arrives_whole(server, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 100)
    fields = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 3, "n": 2}
    whole = server.complete("hello", **fields)
    assert int(whole.headers["content-length"]) == len(whole.content) > 300
    assert [len(one["logprobs"]["tokens"]) for one in whole.json()["choices"]] == [5, 5]
