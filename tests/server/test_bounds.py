"""Bodies, heads and clients that a server must bear: large, deep, broken, slow, gone."""

import json
import random
import socket
import threading
from contextlib import suppress

import httpx
import pytest
from http_server import WAIT_S, error_of, loader, served

from lean.server.loop import MOST_FAILURES
from lean.server.prepare import LARGE_BODY, Preparer

LONG = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(folder):
    with served(loader(folder), max_body_size=2000, max_header_size=4000, max_messages=3) as server:
        yield server
        server.assert_idle()


@pytest.fixture(scope="module")
def impatient(folder):
    with served(loader(folder), read_timeout=0.2, write_timeout=0.2) as server:
        yield server
        server.assert_idle()


def connect(server):
    one = socket.create_connection(server.socket.getsockname(), timeout=WAIT_S)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return one


def head(body=b"", path="/v1/completions", length=None, more=""):
    length = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}Content-Length: {length}\r\n\r\n".encode() + body


def exchange(server, *pieces):
    """Send pieces; what the server answers until it closes the connection."""
    with connect(server) as one:
        for piece in pieces:
            one.sendall(piece)
        data = b""
        while piece := one.recv(65536):
            data += piece
    return data


def status_of(data):
    """Status of a raw answer, whose body is an error in OpenAI's shape."""
    top, _, body = data.partition(b"\r\n\r\n")
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    return int(top.split()[1])


def body_of(**fields):
    return json.dumps({**LONG, **fields}).encode()


def test_a_body_over_the_limit_is_refused_whether_its_length_is_told_or_not(small):
    def chunks():
        for _ in range(100):
            yield b"x" * 100

    assert error_of(small.http.post("/v1/completions", content=b"x" * 3000))[0] == 413
    assert error_of(small.http.post("/v1/completions", content=chunks()))[0] == 413
    assert small.complete("a", max_tokens=1).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_the_number_of_messages_is_bounded(small, path):
    message = {"role": "user", "content": "a"}
    assert small.post(path, {"messages": [message] * 3, "max_tokens": 1}).status_code == 200
    assert error_of(small.post(path, {"messages": [message] * 4, "max_tokens": 1}))[:2] == (400, "messages")


def test_a_length_of_many_digits_is_refused(small):
    assert status_of(exchange(small, head(length="9" * 100))) in (400, 413)


@pytest.mark.parametrize("count", [500, 10_000])
def test_a_large_head_is_refused(small, count):
    lines = "".join(f"x-{index}: y\r\n" for index in range(count))
    assert status_of(exchange(small, head(b"{}", more=lines))) == 400


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00" * 9 + b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n"])
def test_what_is_no_http_is_refused(small, data):
    assert status_of(exchange(small, data)) == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 1500,
        b'{"prompt": ' + b"9" * 1500 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_request_is_refused(small, body):
    assert error_of(small.http.post("/v1/completions", content=body))[0] == 400


def test_an_upgrade_to_another_protocol_is_not_made(small):
    response = small.http.get("/health", headers={"Connection": "Upgrade", "Upgrade": "websocket"})
    assert response.status_code == 200


@pytest.mark.parametrize("data", [b"POST /v1/completions HTT", head(length=50) + b'{"prompt'], ids=["head", "body"])
def test_a_request_that_never_arrives_ends_with_408(impatient, data):
    assert status_of(exchange(impatient, data)) == 408


def test_a_client_that_never_reads_is_disconnected(impatient):
    impatient.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    messages = [{"role": "user", "content": "hi"}]
    body = body_of(messages=messages, stream=True, logprobs=True, top_logprobs=20)
    with connect(impatient) as one:
        one.sendall(head(body, "/v1/chat/completions"))
        impatient.wait_until(lambda: impatient.service.in_flight == 1)
        impatient.assert_idle()


def test_a_client_that_never_reads_holds_nobody_up(shared):
    body = body_of(messages=[{"role": "user", "content": "hi"}], stream=True, logprobs=True, top_logprobs=20)
    with connect(shared) as one:
        one.sendall(head(body, "/v1/chat/completions"))
        shared.wait_until(lambda: shared.service.in_flight == 1)
        for stream in (False, True):
            assert shared.complete("hello", max_tokens=3, stream=stream).status_code == 200
        assert shared.http.get("/health").status_code == 200
    shared.assert_idle()


def test_a_text_that_is_too_long_in_any_case_is_refused_before_it_is_tokenized(shared, monkeypatch):
    monkeypatch.delattr("lean.server.prepare.token_ids")
    monkeypatch.delattr("lean.server.prepare.encode_chat")
    for response, field in ((shared.complete("x" * 3_000_000), "prompt"), (shared.chat("x" * 3_000_000), "messages")):
        assert error_of(response)[:2] == (400, field)
        assert response.json()["error"]["code"] == "context_length_exceeded"
    shared.assert_idle()


def test_large_bodies_that_take_long_to_read_hold_up_no_small_ones(shared, monkeypatch):
    gate, tokenize = threading.Event(), Preparer.tokenize

    def slow(preparer, body):
        assert len(body) < LARGE_BODY or gate.wait(WAIT_S)
        return tokenize(preparer, body)

    monkeypatch.setattr(Preparer, "tokenize", slow)
    large = [threading.Thread(target=shared.post, args=("/tokenize", {"prompt": "x" * LARGE_BODY})) for _ in range(3)]
    for thread in large:
        thread.start()
    try:
        shared.wait_until(lambda: shared.service.in_flight == len(large))
        assert shared.post("/tokenize", {"prompt": "hi"}).json()["count"] == 2
        assert shared.complete("hello", max_tokens=1).status_code == 200
    finally:
        gate.set()
        for thread in large:
            thread.join(WAIT_S)
    shared.assert_idle()


def test_a_crowd_is_told_to_come_again(folder):
    gate = threading.Event()
    with served(loader(folder, max_num_seqs=1), max_waiting=1) as server:
        hold(server, gate)
        threads = [threading.Thread(target=server.complete, args=("a",), kwargs={"max_tokens": 1}) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            server.wait_until(lambda: server.service.in_flight == 2)
            response = server.complete("a", max_tokens=1)
            assert error_of(response)[0] == 429
            assert int(response.headers["retry-after"]) > 0
            assert error_of(server.post("/tokenize", {"prompt": "a"}))[0] == 429
            assert server.http.get("/health").status_code == 200
        finally:
            gate.set()
            for thread in threads:
                thread.join(WAIT_S)
        assert server.complete("a", max_tokens=1).status_code == 200


def hold(server, gate):
    """Steps of the server's engine wait until ``gate`` is set."""
    execute = server.llm.engine.runner.execute

    def held(chunks):
        assert gate.wait(WAIT_S)
        return execute(chunks)

    server.llm.engine.runner.execute = held


def test_a_long_silence_is_filled_with_comments(folder, monkeypatch):
    monkeypatch.setattr("lean.server.answer.PING_S", 0.05)
    gate = threading.Event()
    with served(loader(folder)) as server:
        hold(server, gate)
        with server.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 2, "stream": True}) as response:
            try:
                lines = response.iter_lines()
                assert next(lines).startswith(": ")
            finally:
                gate.set()
            data = [line for line in lines if line and not line.startswith(":")]
        assert data[-1] == "data: [DONE]"
        assert len(data) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_before_the_next_step(folder, stream):
    gate = threading.Event()
    with served(loader(folder)) as server:
        hold(server, gate)
        with connect(server) as one:
            one.sendall(head(body_of(stream=stream)))
            server.wait_until(lambda: server.service.engine.llm.engine.scheduler.has_work)
        server.wait_until(lambda: not server.service.in_flight)
        steps = server.service.engine.snapshot.steps
        gate.set()
        server.assert_idle()
        assert server.service.engine.snapshot.steps <= steps + 2  # the held step, and one that delivers the abort


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_disconnects_leave_nothing_behind(shared, count):
    draw = random.Random(count)
    bodies = [body_of(stream=True), body_of(n=2, temperature=1), body_of(prompt=["a", "b"], stream=True, echo=True)]
    for _ in range(count):
        request = head(draw.choice(bodies))
        with connect(shared) as one:
            one.sendall(request[: draw.randrange(1, len(request) + 1)] if draw.random() < 0.4 else request)
            if draw.random() < 0.5:
                one.settimeout(0.001 * draw.random() + 0.001)
                with suppress(TimeoutError):
                    one.recv(draw.choice([1, 100, 4000]))
            if draw.random() < 0.5:  # a reset in place of a farewell
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    shared.assert_idle()
    assert shared.complete("hello", max_tokens=3).status_code == 200


def test_a_failed_step_is_a_500_and_the_server_is_healthy_again(folder):
    with served(loader(folder)) as server:
        runner = server.llm.engine.runner
        execute, runner.execute = runner.execute, lambda chunks: 1 / 0
        assert error_of(server.complete("a"))[0] == 500
        with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            text = response.read().decode()
        assert '"type": "server_error"' in text
        assert response.status_code == 500 or text.endswith("data: [DONE]\n\n")  # before or after its head was sent
        runner.execute = execute
        assert server.http.get("/health").status_code == 200
        assert server.complete("a", max_tokens=1).status_code == 200


def test_a_step_that_fails_after_the_first_token_ends_the_stream_with_an_error(folder):
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    with served(loader(folder)) as server:
        runner = server.llm.engine.runner
        execute = runner.execute
        for path, body in (("/v1/completions", LONG), ("/v1/chat/completions", chat)):
            for include_usage in (False, True):
                steps = iter([execute, execute, lambda chunks: 1 / 0])
                runner.execute = lambda chunks, steps=steps: next(steps)(chunks)
                events = server.events(path, {**body, "stream_options": {"include_usage": include_usage}})
                assert events[0]["choices"]
                assert events[-1]["error"]["type"] == "server_error"
                assert not any("error" in event for event in events[:-1])
        runner.execute = execute
        server.assert_idle()


def test_a_fault_of_the_server_itself_is_a_500_and_is_logged(folder, monkeypatch, caplog):
    with served(loader(folder)) as server:
        monkeypatch.setattr(server.service.preparer, "_common", lambda *arguments, **named: 1 / 0)
        assert error_of(server.complete("a"))[0] == 500
        monkeypatch.undo()
        assert server.complete("a", max_tokens=1).status_code == 200
        server.assert_idle()
    assert "ZeroDivisionError" in caplog.text


def test_an_engine_that_cannot_go_on_ends_the_server(folder):
    with served(loader(folder)) as server:
        server.llm.engine.runner.execute = lambda chunks: 1 / 0
        for _ in range(MOST_FAILURES):
            with suppress(httpx.TransportError):
                assert server.complete("a").status_code in (500, 503)
        assert server.ended.wait(WAIT_S)
        assert isinstance(server.service.error, ZeroDivisionError)


def test_more_prompts_than_may_ever_wait_are_refused_for_good(folder):
    with served(loader(folder, max_num_seqs=1), max_waiting=1) as server:
        assert error_of(server.complete(["a", "b", "c"], max_tokens=1))[:2] == (400, "prompt")
        assert server.complete(["a", "b"], max_tokens=1).status_code == 200
