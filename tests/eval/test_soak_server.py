"""The load test of the server: a short run, and that it finds what it is for."""

import asyncio
import json
import re
import signal
import socket

import pytest
from http_server import SETTINGS, own_address

from lean.errors import EngineError
from lean.eval.soak_server.__main__ import main
from lean.eval.soak_server.answers import Response, check_error, check_stream, check_whole
from lean.eval.soak_server.clients import patiently
from lean.eval.soak_server.process import ServerProcess

BODY = {"prompt": ["a", "b"], "n": 1, "max_tokens": 4}
USAGE = {"completion_tokens": 8}
CHOICES = [
    {"index": 0, "text": "abc", "finish_reason": "length"},
    {"index": 1, "text": "bcd", "finish_reason": "stop"},
]


def test_a_short_run_finds_no_fault(capsys):
    main(["--minutes", "0.03", "--clients", "6"])
    out = capsys.readouterr().out
    assert "all clients were answered, every block was given back" in out
    assert re.search(r"^ +\d+ \w+: ", out, re.MULTILINE)


def http(status, value, more=""):
    return Response(f"HTTP/1.1 {status} x\r\nContent-Type: a\r\n{more}\r\n".encode() + value)


def whole(choices=CHOICES, usage=USAGE, status=200):
    return http(status, json.dumps({"choices": choices, "usage": usage}).encode())


def stream(*events, done=True):
    frames = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * done
    chunks = "".join(f"{len(frame):x}\r\n{frame}\r\n" for frame in frames)
    return http(200, f"{chunks}0\r\n\r\n".encode(), "Transfer-Encoding: chunked\r\n")


EVENTS = [{"choices": [choice]} for choice in CHOICES]
GOOD = (*EVENTS, {"choices": [], "usage": USAGE})


def test_good_answers_pass():
    assert check_whole(whole(), BODY) == "answered"
    assert check_stream(stream(*GOOD), BODY) == "answered"


@pytest.mark.parametrize(
    "response",
    [
        whole(status=500),
        whole(CHOICES[:1]),
        whole([CHOICES[0], {**CHOICES[1], "text": "a"}]),
        whole([CHOICES[0], {**CHOICES[1], "finish_reason": "error"}]),
        whole(usage={"completion_tokens": 9}),
    ],
    ids=["status", "missing", "of another prompt", "failed", "too long"],
)
def test_wrong_answers_are_found(response):
    with pytest.raises(EngineError):
        check_whole(response, BODY)


@pytest.mark.parametrize(
    "response", [stream(*GOOD, done=False), stream(*GOOD[1:]), stream(done=False)], ids=["cut off", "missing", "empty"]
)
def test_wrong_streams_are_found(response):
    with pytest.raises(EngineError):
        check_stream(response, BODY)


def test_errors_of_another_status_or_shape_are_found():
    good = {"error": dict.fromkeys(("message", "type", "param", "code"))}
    assert check_error(http(400, json.dumps(good).encode()), 400, 429) == good["error"]
    for response in (http(500, json.dumps(good).encode()), http(400, b'{"error": {}}')):
        with pytest.raises(EngineError):
            check_error(response, 400, 429)


@pytest.mark.parametrize("name", ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"])
def test_a_server_that_is_not_idle_is_found(monkeypatch, name):
    idle = dict.fromkeys(("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"), 0.0)
    server = object.__new__(ServerProcess)
    monkeypatch.setattr(ServerProcess, "metrics", lambda self: idle)
    server.wait_until_idle(0)
    idle[f"vllm:{name}"] = 0.5
    with pytest.raises(EngineError, match=name):
        server.wait_until_idle(0)


def test_a_client_gives_up_after_some_ticks_and_not_before(monkeypatch):
    monkeypatch.setattr("lean.eval.soak_server.clients.PATIENCE", 3)
    monkeypatch.setattr("lean.eval.soak_server.clients.TICK_S", 0.001)

    async def answered():
        return "answered"

    async def faulty():
        raise EngineError("a fault")

    assert asyncio.run(patiently(answered())) == "answered"
    with pytest.raises(EngineError, match="a fault"):
        asyncio.run(patiently(faulty()))
    with pytest.raises(TimeoutError):
        asyncio.run(patiently(asyncio.Event().wait()))


@pytest.mark.slow
def test_a_killed_server_starts_again_on_its_port_at_once(tiny):
    folder = tiny("llama", num_hidden_layers=1)
    options = ("--no-probe", *(f"--{key.replace('_', '-')}={value}" for key, value in SETTINGS.items()))
    host = f"--host={own_address()}"
    first = ServerProcess(folder, *options, host)
    with socket.create_connection(first.address) as one:
        one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert one.recv(12) == b"HTTP/1.1 200"
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
        second = ServerProcess(folder, *options, host, f"--port={first.address[1]}")
        assert second.address == first.address
        second.wait_until_idle(0)
        assert second.end() == 0


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(EngineError, match="no-such-model"):
        ServerProcess(tmp_path / "no-such-model")
