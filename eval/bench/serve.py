"""Speed of the server, beside `LLM.generate` on the same engine and the same requests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

from lean.errors import EngineError
from lean.eval.bench.model import bench_tokens
from lean.llm import LLM
from lean.sampling_params import SamplingParams
from lean.server.config import ServerConfig
from lean.server.run import listen, run
from lean.server.service import Service

CLIENT = Path(__file__).with_name("serve_client.py")


@dataclass(frozen=True)
class ServeRow:
    """What was measured with a number of streams. Times in milliseconds, of all rounds together.

    Attributes:
        prompt_tokens, tokens: of each request. tokens_per_s: median of the rounds, all streams together.
        generate_tokens_per_s: the same of `LLM.generate`. share: of the two medians.
        first_*, gap_*: until the first token; between two tokens of a stream. health_p99: of /health meanwhile.
        client_share: CPU seconds of the client per second, which the server does not have.
    """

    streams: int
    prompt_tokens: int
    tokens: int
    rounds: int
    tokens_per_s: float
    generate_tokens_per_s: float
    share: float
    first_p50: float | None
    first_p99: float | None
    gap_p50: float | None
    gap_p99: float | None
    health_p50: float | None
    health_p99: float | None
    client_share: float


def bench_serve(
    llm: LLM, streams: Sequence[int], prompt_tokens: int, tokens: int, rounds: int, long_prompt: int = 0
) -> Iterator[ServeRow]:
    """Measure each number of streams; the server and `LLM.generate` take turns.

    Args:
        long_prompt: at the end also one prompt of this length, with one token: what /health sees of a long prefill. 0:
            not measured.
    """
    with serving(llm) as port, client() as process:
        cases = [(count, prompt_tokens, tokens) for count in streams]
        cases += [(1, long_prompt, 1)] if long_prompt else []
        for count, length, most in cases:
            prompts = [[*bench_tokens(llm, length)[:-1], 10 + number] for number in range(count)]  # none is another's
            plan = {"host": "127.0.0.1", "port": port, "prompts": prompts, "tokens": most}
            ask(process, plan)  # warms both sides up
            found, own = [], []
            for _ in range(rounds):
                found.append(ask(process, plan))
                own.append(generate(llm, prompts, most))
            yield row(found, own, length, most)


def generate(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second of `LLM.generate`."""
    begun = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=0))
    return sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - begun)


def row(found: list[dict[str, Any]], own: list[float], prompt_tokens: int, tokens: int) -> ServeRow:
    """The figures of some rounds."""
    answers = [answer for one in found for answer in one["answers"]]
    firsts = sorted(answer["first"] for answer in answers)
    gaps = sorted(gap for answer in answers for gap in answer["gaps"])
    health = sorted(seconds for one in found for seconds in one["health"])
    speed = median(sum(answer["tokens"] for answer in one["answers"]) / one["seconds"] for one in found)
    return ServeRow(
        len(found[0]["answers"]),
        prompt_tokens,
        tokens,
        len(found),
        speed,
        median(own),
        speed / median(own),
        part_of(firsts, 0.5),
        part_of(firsts, 0.99),
        part_of(gaps, 0.5),
        part_of(gaps, 0.99),
        part_of(health, 0.5),
        part_of(health, 0.99),
        median(one["cpu_seconds"] / one["seconds"] for one in found),
    )


def part_of(ordered: list[float], part: float) -> float | None:
    """A quantile of ordered seconds, in milliseconds; None of no seconds."""
    return 1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


@contextmanager
def serving(llm: LLM) -> Iterator[int]:
    """Serve an engine from a thread, with its steps in another one; yields the port."""
    config = ServerConfig(port=0, max_waiting=10_000)
    socket = listen(config)
    ready = threading.Event()
    service = Service(lambda: llm, config, ("bench",), SamplingParams(), on_ready=ready.set)
    stop: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(service.stop))
        await run(service, socket)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="lean-http", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield int(socket.getsockname()[1])
    finally:
        stop[0]()
        thread.join()


@contextmanager
def client() -> Iterator[subprocess.Popen[str]]:
    """The client's process."""
    command = [sys.executable, "-I", str(CLIENT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            _pipe(process.stdin).close()


def ask(process: subprocess.Popen[str], plan: dict[str, Any]) -> dict[str, Any]:
    """Let the client carry out a plan. Raises EngineError if it fails."""
    _pipe(process.stdin).write(json.dumps(plan) + "\n")
    _pipe(process.stdin).flush()
    line = _pipe(process.stdout).readline()
    if not line:
        raise EngineError("the client of the benchmark failed; its traceback is above")
    return json.loads(line)


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
