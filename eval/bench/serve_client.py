"""The client of `lean bench serve`: a process of its own, which asks a server and times its answers.

It reads a plan from standard input and writes what it measured to standard output, both as one line of JSON per round.
It imports nothing of lean and parses no more of HTTP than it needs, so that it takes little of the CPUs.
"""

import asyncio
import json
import sys
import time
from itertools import pairwise
from typing import Any

HEALTH_S = 0.1  # between two questions for the server's health, each of which costs about as much as some frames
ROUND_S = 1800  # until a round counts as failed
_EVENT, _END, _ERROR = b"data: {", b"data: [DONE]", b'data: {"error"'
_USAGE = b'"choices":[],'  # in the one chunk that has nothing but the usage


class Stream(asyncio.Protocol):
    """One streamed answer. Events may arrive in pieces: only the bytes since the last whole line are kept.

    Attributes:
        times: of the chunks with text. usage: of the last chunk. done: set at the end.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._rest = b""
        self.begun = 0.0
        self.times: list[float] = []
        self.usage: dict[str, Any] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.begun = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        lines, newline, self._rest = (self._rest + data).rpartition(b"\n")
        if not newline or self.done.done():
            return
        refused = not self.times and lines.startswith(b"HTTP/1.1 ") and not lines.startswith(b"HTTP/1.1 200")
        if refused or _ERROR in lines:
            self._fail(lines)
        else:
            self._read(lines, now)

    def _read(self, lines: bytes, now: float) -> None:
        count = lines.count(_EVENT)
        place = lines.find(_USAGE)
        if place >= 0:
            begin, end = lines.rindex(_EVENT, 0, place), lines.find(b"\n", place)
            self.usage = json.loads(lines[begin + len(b"data: ") : end if end >= 0 else None])["usage"]
            count -= 1
        self.times += [now] * count
        if _END in lines:
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._fail(b"the connection was closed")

    def _fail(self, lines: bytes) -> None:
        self.done.set_exception(RuntimeError(lines.decode("utf-8", "replace")[-2000:]))

    @property
    def found(self) -> dict[str, Any]:
        """What was measured: seconds until the first token and between chunks; tokens, and those that were computed."""
        usage = self.usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return {
            "first": self.times[0] - self.begun,
            "gaps": [after - before for before, after in pairwise(self.times)],
            "tokens": usage["completion_tokens"],
            "computed": usage["prompt_tokens"] - cached + usage["completion_tokens"],
        }


async def ask(plan: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """Stream one answer."""
    host, port = plan["host"], plan["port"]
    body = {
        "prompt": prompt,
        "max_tokens": plan["tokens"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **plan["fields"],
    }
    content = json.dumps(body).encode()
    request = _head("POST", "/v1/completions", host, len(content)) + content
    transport, stream = await asyncio.get_running_loop().create_connection(lambda: Stream(request), host, port)
    try:
        await stream.done
    finally:
        transport.close()
    return stream.found


def _head(method: str, path: str, host: str, length: int = 0) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"{head}\r\n\r\n".encode()


async def watch_health(host: str, port: int, found: list[float]) -> None:
    """Ask for the server's health again and again, on one connection; seconds until each answer."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        while True:
            begun = time.perf_counter()
            writer.write(_head("GET", "/health", host))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            found.append(time.perf_counter() - begun)
            await asyncio.sleep(HEALTH_S)
    finally:
        writer.close()


async def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """All prompts of a plan at once, one stream each."""
    health: list[float] = []
    watcher = None
    begun, cpu = time.perf_counter(), time.process_time()
    if plan["health"]:
        watcher = asyncio.create_task(watch_health(plan["host"], plan["port"], health))
    try:
        async with asyncio.timeout(ROUND_S):
            answers = await asyncio.gather(*(ask(plan, prompt) for prompt in plan["prompts"]))
    finally:
        if watcher is not None:
            watcher.cancel()
    return {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu,
        "answers": answers,
        "health": health,
    }


def main() -> None:
    """Carry out plans until standard input ends."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(measure(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
