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

HEALTH_S = 0.02  # between two questions for the server's health


async def ask(host: str, port: int, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Stream one answer: seconds until its first token, and between its tokens."""
    body = json.dumps(
        {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 0}
    ).encode()  # with logprobs every token has a chunk of its own, also one without text
    reader, writer = await asyncio.open_connection(host, port)
    begun = time.perf_counter()
    writer.write(_head("POST", "/v1/completions", host, len(body)) + body)
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            if b'"error"' in line[:16]:
                raise RuntimeError(line.decode())
            times.append(time.perf_counter())
        elif line.startswith(b"data: [DONE]"):
            break
        elif line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(line.decode() + (await reader.read(4000)).decode())
    writer.close()
    gaps = [after - before for before, after in pairwise(times)]
    return {"first": times[0] - begun, "gaps": gaps, "tokens": len(times)}


def _head(method: str, path: str, host: str, length: int = 0) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n".encode()


async def watch_health(host: str, port: int, found: list[float]) -> None:
    """Ask for the server's health again and again, on one connection; seconds until each answer."""
    reader, writer = await asyncio.open_connection(host, port)
    while True:
        begun = time.perf_counter()
        writer.write(_head("GET", "/health", host))
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        found.append(time.perf_counter() - begun)
        await asyncio.sleep(HEALTH_S)


async def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """All prompts of a plan at once, one stream each."""
    host, port = plan["host"], plan["port"]
    health: list[float] = []
    watcher = asyncio.create_task(watch_health(host, port, health))
    begun, cpu = time.perf_counter(), time.process_time()
    try:
        answers = await asyncio.gather(*(ask(host, port, prompt, plan["tokens"]) for prompt in plan["prompts"]))
    finally:
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
