"""Clients of every kind for a load test of the server: patient, slow, broken, rude. Each checks what it is answered."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from lean.errors import EngineError
from lean.eval.soak_server.answers import Response, check_error, check_stream, check_whole

PATIENCE = 300  # ticks that a client waits for anything; after more of them it has found a fault
TICK_S = 1.0
BODY_LIMIT = 20_000  # bytes; the server's, which some clients exceed
R = TypeVar("R")
_RESET = struct.pack("ii", 1, 0)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Bodies that must be refused: path, body, and the field that the error names.
BAD: tuple[tuple[str, bytes, str | None], ...] = (
    (COMPLETIONS, b"", None),
    (COMPLETIONS, b"{", None),
    (COMPLETIONS, b"\xff\xfe\x00", None),
    (COMPLETIONS, b'{"prompt": "\xed\xa0\x80"}', None),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', None),
    (COMPLETIONS, b"[" * 9000, None),
    (CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", None),
    (COMPLETIONS, b'{"prompt": "a", "n": 1000000}', "n"),
    (COMPLETIONS, b'{"prompt": "a", "max_tokens": -1}', "max_tokens"),
    (COMPLETIONS, b'{"prompt": "a", "logprobs": 1000}', "logprobs"),
    (COMPLETIONS, b'{"prompt": "a", "stop": [' + b'"x",' * 3000 + b'"x"]}', "stop"),
    (COMPLETIONS, b'{"prompt": [1, 2, 100000]}', "prompt"),
    (COMPLETIONS, b'{"prompt": "' + b"x" * 300 + b'"}', "prompt"),
    (CHAT, b'{"messages": []}', "messages"),
    (CHAT, b'{"messages": [{"role": "critic", "content": "a"}]}', "messages[0].role"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "tools"),
    ("/detokenize", b'{"tokens": [-1]}', "tokens"),
)


class Client:
    """Sends random requests, one after the other.

    Args:
        address: of the server. key: that it wants. write_timeout: the server's, in seconds.
        draw: random numbers. count: how often each kind of client was answered in which way.
    """

    def __init__(
        self, address: tuple[str, int], key: str, write_timeout: float, draw: random.Random, count: Counter[str]
    ) -> None:
        self._address, self._key, self._write_timeout = address, key, write_timeout
        self.draw, self.count = draw, count
        kinds: dict[Callable[[], Coroutine[Any, Any, str]], int] = {
            self.whole: 6, self.stream: 6, self.leaver: 10, self.slow: 2, self.deaf: 1, self.bad: 6, self.half: 1,
            self.large: 1, self.stranger: 2, self.tokens: 2, self.watcher: 3,
        }  # fmt: skip
        self._kinds, self._weights = list(kinds), list(kinds.values())

    async def run(self, going: Callable[[], bool]) -> None:
        """Send requests while ``going()``. Raises EngineError for an answer that must not be."""
        while going():
            kind = self.draw.choices(self._kinds, self._weights)[0]
            name = kind.__name__  # type: ignore[attr-defined]
            try:
                outcome = await patiently(kind())
            except TimeoutError:
                raise EngineError(f"a client of kind {name} waited {PATIENCE * TICK_S:g} s") from None
            self.count[f"{name}: {outcome}"] += 1
            await asyncio.sleep(self.draw.random() * 0.05)

    # --- what is sent ---

    def head(self, path: str, length: int, method: str = "POST", key: str | None = None) -> bytes:
        key = self._key if key is None else key
        return (
            f"{method} {path} HTTP/1.1\r\nHost: {self._address[0]}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Length: {length}\r\nConnection: close\r\n\r\n"
        ).encode()

    def request(self, stream: bool) -> tuple[bytes, dict[str, Any]]:
        """A request that must be served, and its body."""
        draw = self.draw
        text = "".join(draw.choices("abcdefgh é", k=draw.choice((1, 5, 30, 90))))
        if draw.random() < 0.5:
            text = ("You are a helpful assistant of few words. " + text)[: draw.choice((60, 120))]
        body: dict[str, Any] = {
            "max_tokens": draw.choice((1, 4, 16, 64)),
            "temperature": draw.choice((0, 0.7, 1.2)),
            "n": draw.choice((1, 1, 1, 2)),
            "stop": draw.choice((None, ["a"], "no such text")),
            "ignore_eos": draw.random() < 0.5,
            "stream": stream,
            "cache_salt": draw.choice((None, None, "a")),
        }
        path = draw.choice((CHAT, COMPLETIONS))
        if path == CHAT:
            body |= {"messages": [{"role": "user", "content": text[:60]}], "logprobs": draw.random() < 0.3}
        else:
            body |= {"prompt": draw.choice((text, [text, "b"])), "echo": True, "logprobs": draw.choice((None, None, 2))}
        if stream:
            body["stream_options"] = {"include_usage": True}
        data = json.dumps(body).encode()
        return self.head(path, len(data)) + data, body

    async def connect(self, buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        one = socket.socket()
        one.setblocking(False)
        if buffer is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        await asyncio.get_running_loop().sock_connect(one, self._address)
        return await asyncio.open_connection(sock=one, limit=buffer or 2**16)

    async def exchange(self, data: bytes) -> Response:
        """Send a request and read the answer to its end."""
        reader, writer = await self.connect()
        try:
            with suppress(ConnectionError):  # a refusal may come before all has been sent
                writer.write(data)
                await writer.drain()
            return Response(await _read_all(reader))
        finally:
            writer.close()

    # --- kinds of clients: what they do, and how it went ---

    async def whole(self) -> str:
        data, body = self.request(stream=False)
        return check_whole(await self.exchange(data), body)

    async def stream(self) -> str:
        data, body = self.request(stream=True)
        return check_stream(await self.exchange(data), body)

    async def leaver(self) -> str:
        """Leaves at any moment: within the request, before an answer, within it; politely or with a reset."""
        data, _ = self.request(stream=self.draw.random() < 0.6)
        reader, writer = await self.connect()
        phase = self.draw.choice(("within the request", "at once", "after a while", "within the answer"))
        writer.write(data[: self.draw.randrange(len(data))] if phase == "within the request" else data)
        with suppress(ConnectionError):
            await writer.drain()
            if phase == "after a while":
                await asyncio.sleep(self.draw.random() * 0.1)
            elif phase == "within the answer":
                await reader.read(self.draw.choice((1, 300, 3000)))
        if self.draw.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
        return phase

    async def slow(self) -> str:
        """Reads little, with pauses, to the end."""
        data, body = self.request(stream=True)
        reader, writer = await self.connect(buffer=4096)
        writer.write(data)
        found = b""
        with suppress(ConnectionError):
            while piece := await reader.read(1000):
                found += piece
                await asyncio.sleep(0.02)
        writer.close()
        return check_stream(Response(found), body)

    async def deaf(self) -> str:
        """Never reads a long answer, until it must have been dropped."""
        body = {
            "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 4, "max_tokens": 150,
            "ignore_eos": True, "logprobs": True, "top_logprobs": 20,
        }  # fmt: skip
        data = json.dumps(body).encode()
        reader, writer = await self.connect(buffer=4096)
        writer.write(self.head(CHAT, len(data)) + data)
        await asyncio.sleep(self._write_timeout * 3)
        found = await _read_all(reader)
        writer.close()
        return "answered" if found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") else "dropped"

    async def bad(self) -> str:
        path, body, param = self.draw.choice(BAD)
        response = await self.exchange(self.head(path, len(body)) + body)
        error = check_error(response, 400, 429)
        if param is not None and response.status == 400 and error["param"] != param:
            raise EngineError(f"an error names {error['param']!r} in place of {param!r}")
        return str(response.status)

    async def half(self) -> str:
        """Sends a part of a body and waits."""
        response = await self.exchange(self.head(COMPLETIONS, 50) + b'{"prompt": ')
        check_error(response, 408, 429)
        return str(response.status)

    async def large(self) -> str:
        response = await self.exchange(self.head(COMPLETIONS, BODY_LIMIT * 4) + b"x" * BODY_LIMIT * 4)
        if response.status == 0:
            return "reset while it sent"  # the server closed before it had read everything
        check_error(response, 413, 429)
        return str(response.status)

    async def stranger(self) -> str:
        """Has no right to be here."""
        body = b'{"prompt": "a"}'
        head = self.head(COMPLETIONS, len(body), key="wrong")
        right = 401
        if self.draw.random() < 0.5:
            head = self.head(COMPLETIONS, len(body)).replace(b"Host: ", b"Host: evil.example.")
            right = 403
        check_error(await self.exchange(head + body), right)
        return str(right)

    async def tokens(self) -> str:
        text = "".join(self.draw.choices("abé😀\n ", k=20))
        body = json.dumps({"prompt": text}).encode()
        found = await self.exchange(self.head("/tokenize", len(body)) + body)
        if found.status == 200:
            body = json.dumps({"tokens": json.loads(found.body)["tokens"]}).encode()
            found = await self.exchange(self.head("/detokenize", len(body)) + body)
        if found.status == 200:
            if json.loads(found.body)["prompt"] != text:
                raise EngineError(f"{text!r} came back as {found.body!r}")
            return "200"
        check_error(found, 429)
        return str(found.status)

    async def watcher(self) -> str:
        path = self.draw.choice(("/health", "/metrics", "/v1/models", "/openapi.json"))
        response = await self.exchange(self.head(path, 0, "GET"))
        if response.status != 200:
            raise EngineError(f"{path} has status {response.status}")
        return path


async def patiently(work: Coroutine[Any, Any, R]) -> R:
    """What ``work`` returns. Raises TimeoutError after `PATIENCE` ticks.

    A tick counts once however long it took: the time in which this process was stopped, or waited for a busy machine,
    says nothing about the server.
    """
    task = asyncio.create_task(work)
    try:
        for _ in range(PATIENCE):
            if (await asyncio.wait({task}, timeout=TICK_S))[0]:
                return task.result()
        raise TimeoutError
    finally:
        task.cancel()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection ends, in whichever way."""
    found = bytearray()
    with suppress(ConnectionError):
        while piece := await reader.read(2**16):
            found += piece
    return bytes(found)
