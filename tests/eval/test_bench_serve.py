"""`lean bench serve`: what it reports of a tiny model."""

import asyncio
import json

import pytest
from commands import lean, refused

from lean import EngineError, ModelError
from lean.eval.bench.serve import bench_serve, part_of, row
from lean.eval.bench.serve_client import Stream


def test_every_number_of_streams_gets_a_row(tiny):
    model = str(tiny("llama", num_hidden_layers=1))
    numbers = ("--streams", "1,3", "--prompt", "8", "--tokens", "5", "--long-prompt", "40", "--rounds", "2")
    rows = [json.loads(line) for line in lean("bench", "serve", model, *numbers, "--json").splitlines()]
    assert [(one["streams"], one["prompt_tokens"], one["tokens"]) for one in rows] == [(1, 8, 5), (3, 8, 5), (1, 40, 1)]
    assert [one["computed"] for one in rows] == [8 + 5, 3 * (8 + 5), 40 + 1]
    assert all(one["tokens_per_s"] > 0 and one["generate_tokens_per_s"] > 0 for one in rows)
    assert all(one["gap_p99"] >= one["gap_p50"] >= 0 for one in rows[:2])


def test_figures_are_medians_of_rounds_and_quantiles_of_requests():
    def found(seconds):
        answers = [{"first": 0.1, "gaps": [0.01, 0.03], "tokens": 3, "computed": 11}] * 2
        return {"seconds": seconds, "cpu_seconds": seconds / 4, "answers": answers, "health": [0.002, 0.001]}

    own = [{"seconds": seconds, "tokens": 6, "computed": 22} for seconds in (1.0, 1.2, 1.5)]
    one = row([found(1.0), found(2.0), found(6.0)], own, 8, 3)
    assert (one.streams, one.rounds, one.computed, one.tokens_per_s, one.share) == (2, 3, 22, 3.0, 0.6)
    assert (one.first_p50, one.gap_p50, one.gap_p99) == (100, 30, 30)
    assert (one.health_p50, one.health_p99, one.client_share) == (2, 2, 0.25)
    assert part_of(list(map(float, range(100))), 0.99) == 99_000


def test_sides_that_did_not_do_the_same_work_are_not_compared():
    answer = {"first": 0.1, "gaps": [0.01], "tokens": 2, "computed": 5}
    found = {"seconds": 1.0, "cpu_seconds": 0.1, "answers": [answer], "health": [0.001]}
    with pytest.raises(EngineError, match=r"computed \[5, 10\] tokens"):
        row([found], [{"seconds": 1.0, "tokens": 2, "computed": 10}], 8, 2)


def test_a_model_that_cannot_be_loaded_is_an_error():
    def load():
        raise ModelError("no such model")

    with pytest.raises(ModelError, match="no such model"):
        next(bench_serve(load, [1], 8, 4, 1))


def stream_of(*pieces):
    """What the client reads of an answer that arrives in these pieces."""

    async def read():
        stream = Stream(b"")
        for piece in pieces:
            stream.data_received(piece)
        await stream.done
        return len(stream.times), stream.usage.get("completion_tokens")

    return asyncio.run(read())


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CHUNK = b'data: {"id":"a","choices":[{"index":0,"text":"x"}],"usage":null}\n\n'
LAST = b'data: {"id":"a","choices":[],"usage":{"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_a_stream_is_read_in_whatever_pieces_it_arrives():
    data = HEAD + CHUNK + b": a comment\n\n" + CHUNK + LAST + DONE
    for cut in range(1, len(data)):
        assert stream_of(data[:cut], data[cut:]) == (2, 2)


@pytest.mark.parametrize(
    "data", [b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": 1}\n', HEAD + CHUNK + b'data: {"error":1}\n\n']
)
def test_an_answer_that_fails_is_an_error(data):
    with pytest.raises(RuntimeError, match="error"):
        stream_of(data)


def test_numbers_that_measure_nothing_are_refused(tiny):
    assert "--rounds 0" in refused("bench", "serve", "m", "--rounds", "0")
