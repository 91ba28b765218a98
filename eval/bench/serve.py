"""Speed of the server, beside `LLM.generate` on the same engine and the same requests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
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
from lean.server.loop import EngineLoop
from lean.server.run import listen, run
from lean.server.service import Service, new_id

CLIENT = Path(__file__).with_name("serve_client.py")
WARM_UP_TOKENS = 4  # of each answer


@dataclass(frozen=True)
class ServeRow:
    """What was measured with a number of streams. Times in milliseconds, of all rounds together.

    Attributes:
        prompt_tokens, tokens: of each request. computed: tokens that each side computed in a round, prompts included.
        tokens_per_s: generated ones, median of the rounds, all streams together. generate_tokens_per_s: the same of
            `LLM.generate`. share: of the two medians.
        first_*, gap_*: until the first token; between two chunks of a stream. health_p99: of /health meanwhile.
        client_share: CPU seconds of the client per second, which the server does not have.
    """

    streams: int
    prompt_tokens: int
    tokens: int
    rounds: int
    computed: int
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
    load: Callable[[], LLM],
    streams: Sequence[int],
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    long_prompt: int = 0,
) -> Iterator[ServeRow]:
    """Measure each number of streams; the server and `LLM.generate` take turns.

    Both run in the thread that loads the engine. OpenMP gives every thread that computes a team of its own, and once
    there are more of its threads than CPUs, they hardly spin any more: steps then take longer on both sides.

    Args:
        load: makes the engine.
        long_prompt: at the end also one prompt of this length, with one token: what /health sees of a long prefill. 0:
            not measured.
    """
    with serving(load) as (port, engine), client() as process:
        assert engine.llm is not None
        cases = [(count, prompt_tokens, tokens) for count in streams]
        cases += [(1, long_prompt, 1)] if long_prompt else []
        for count, length, most in cases:
            text = bench_tokens(engine.llm, length - 1)
            case = Case(
                port, engine, [[10 + number, *text] for number in range(count)], most
            )  # none begins like another
            if length == prompt_tokens:  # the long prompt finds both sides warm, and takes long
                case.served(process, WARM_UP_TOKENS)
                case.generated(WARM_UP_TOKENS)
            found, own = [], []
            for _ in range(rounds):
                found.append(case.served(process))
                own.append(case.generated())
            yield row(found, own, length, most)


class Case:
    """Prompts that both sides answer. Every turn has a salt of its own, so that none finds what another computed."""

    def __init__(self, port: int, engine: EngineLoop, prompts: list[list[int]], tokens: int) -> None:
        self._port, self._engine, self._prompts, self._tokens = port, engine, prompts, tokens

    def served(self, process: subprocess.Popen[str], most: int | None = None) -> dict[str, Any]:
        """A turn of the server: what the client found. ``most``: tokens of an answer at most."""
        tokens = min(self._tokens, most or self._tokens)
        plan = {"host": "127.0.0.1", "port": self._port, "prompts": self._prompts, "tokens": tokens, "health": True}
        return ask(process, {**plan, "fields": {"cache_salt": new_id("turn")}})

    def generated(self, most: int | None = None) -> dict[str, Any]:
        """A turn of `LLM.generate`, see `timed`."""
        params = SamplingParams(max_tokens=min(self._tokens, most or self._tokens), temperature=0, ignore_eos=True)
        done: Future[dict[str, Any]] = Future()

        def turn(llm: LLM) -> None:
            try:
                done.set_result(timed(llm, self._prompts, params))
            except Exception as error:
                done.set_exception(error)

        self._engine.call(turn)
        return done.result()


def timed(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Seconds of `LLM.generate`, its tokens, and those that it computed."""
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, cache_salt=new_id("turn"))
    seconds = time.perf_counter() - begun
    tokens = sum(len(output.token_ids) for output in outputs)
    computed = tokens + sum(output.prompt_tokens - output.cached_tokens for output in outputs)
    return {"seconds": seconds, "tokens": tokens, "computed": computed}


def row(found: list[dict[str, Any]], own: list[dict[str, Any]], prompt_tokens: int, tokens: int) -> ServeRow:
    """The figures of some rounds. Raises EngineError if the two sides have not done the same work."""
    computed = {sum(answer["computed"] for answer in one["answers"]) for one in found}
    computed |= {one["computed"] for one in own}
    if len(computed) > 1:
        raise EngineError(
            f"the rounds computed {sorted(computed)} tokens, which should be equal: they cannot be compared"
        )
    answers = [answer for one in found for answer in one["answers"]]
    firsts = sorted(answer["first"] for answer in answers)
    gaps = sorted(gap for answer in answers for gap in answer["gaps"])
    health = sorted(seconds for one in found for seconds in one["health"])
    speed = median(sum(answer["tokens"] for answer in one["answers"]) / one["seconds"] for one in found)
    generate_speed = median(one["tokens"] / one["seconds"] for one in own)
    return ServeRow(
        len(found[0]["answers"]),
        prompt_tokens,
        tokens,
        len(found),
        computed.pop(),
        speed,
        generate_speed,
        speed / generate_speed,
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
def serving(load: Callable[[], LLM]) -> Iterator[tuple[int, EngineLoop]]:
    """Serve an engine from a thread, with its steps in another one; yields the port and the engine's thread.

    Raises what ``load`` raises.
    """
    config = ServerConfig(port=0, max_waiting=10_000)
    socket = listen(config)
    ready = threading.Event()
    service = Service(load, config, ("bench",), SamplingParams(), on_ready=ready.set)
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(service.stop))
        await run(service, socket)

    def serve() -> None:
        try:
            asyncio.run(main())
        finally:
            ready.set()  # also where the engine could not be loaded

    thread = threading.Thread(target=serve, name="lean-http", daemon=True)
    thread.start()
    ready.wait()
    try:
        if service.error is not None:
            raise service.error
        yield int(socket.getsockname()[1]), service.engine
    finally:
        if thread.is_alive():
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
