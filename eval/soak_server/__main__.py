"""Random load on `lean serve`: every client is answered as it must be, and nothing is left behind.

The server runs in a process of its own, with a model of random weights. Clients chat, stream, leave at any moment, read
slowly or never, and send what is no request. At the end every block must be free, nothing may run on, resident memory
must be what it was, and the server must end in time although streams are open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from lean.errors import EngineError, run_main
from lean.eval.soak import GROWTH, MODEL_LENGTH, tiny_model, verdict
from lean.eval.soak_server.clients import BODY_LIMIT, Client
from lean.eval.soak_server.process import ServerProcess
from lean.store.home import write_result

KEY = "load-test"
LEAST_MINUTES = 5.0  # a shorter run says nothing about memory: the server's first requests fill its caches
READ_TIMEOUT_S, WRITE_TIMEOUT_S, SHUTDOWN_S = 2, 1, 1
IDLE_S = 60.0  # until nothing may run any more, on a busy machine
OPTIONS = (
    "--no-probe", "--device=cpu", "--threads=1", "--block-size=16", "--num-blocks=40", "--max-num-seqs=6",
    "--prefill-chunk=64", f"--max-model-len={MODEL_LENGTH}", "--max-waiting=16", f"--max-body-size={BODY_LIMIT}",
    f"--read-timeout={READ_TIMEOUT_S}", f"--write-timeout={WRITE_TIMEOUT_S}", f"--shutdown-timeout={SHUTDOWN_S}",
)  # fmt: skip
TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"


def chat_model(folder: Path, seed: int) -> None:
    """Save a model with random weights and a chat template."""
    torch.manual_seed(seed)
    tiny_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


async def load(server: ServerProcess, clients: int, minutes: float, seed: int) -> tuple[Counter[str], list[Any]]:
    """Let clients send requests for some time. What was answered how often, and the server's memory over time."""
    count: Counter[str] = Counter()
    end = time.monotonic() + minutes * 60

    def going() -> bool:
        return time.monotonic() < end

    tasks = [
        asyncio.create_task(
            Client(server.address, KEY, WRITE_TIMEOUT_S, random.Random(f"{seed}/{number}"), count).run(going)
        )
        for number in range(clients)
    ]
    watcher = asyncio.create_task(watch(server, minutes, count, going))
    done, others = await asyncio.wait([*tasks, watcher], return_when=asyncio.FIRST_EXCEPTION)
    for task in others:
        task.cancel()
    for task in done:
        task.result()
    return count, watcher.result()


async def watch(server: ServerProcess, minutes: float, count: Counter[str], going: Any) -> list[dict[str, float]]:
    """Print a line every minute (8 lines at least), and return the lines' figures."""
    curve: list[dict[str, float]] = []
    start = time.monotonic()
    interval = min(60.0, minutes * 60 / 8)
    print("minutes  requests   tokens  preemptions  cached  RSS MiB", flush=True)
    while going():
        await asyncio.sleep(interval)
        if server.ended:
            raise EngineError(f"the server ended: {server.last_lines}")
        found = await asyncio.to_thread(server.metrics)
        point = {
            "minutes": (time.monotonic() - start) / 60,
            "requests": sum(count.values()),
            "tokens": found["vllm:generation_tokens_total"],
            "preemptions": found["vllm:num_preemptions_total"],
            "cached": found["vllm:prefix_cache_hits_total"] / max(1, found["vllm:prefix_cache_queries_total"]),
            "rss_mib": server.resident_bytes() / 2**20,
        }
        curve.append(point)
        print(
            f"{point['minutes']:7.1f} {point['requests']:9} {point['tokens']:8.0f} {point['preemptions']:12.0f} "
            f"{point['cached']:7.1%} {point['rss_mib']:8.1f}",
            flush=True,
        )
    return curve


def check_quiet(server: ServerProcess) -> None:
    """Raise EngineError unless every block is free and the engine makes no step any more."""
    server.wait_until_idle(IDLE_S)
    steps = server.metrics()["lean_steps"]
    time.sleep(0.5)
    if server.metrics()["lean_steps"] != steps:
        raise EngineError("the engine goes on although nobody waits for an answer")


async def end_with_open_streams(server: ServerProcess) -> float:
    """Order the server to end while streams run; the seconds it took. Raises EngineError for another exit code."""
    client = Client(server.address, KEY, WRITE_TIMEOUT_S, random.Random(0), Counter())
    body = json.dumps({"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 4}).encode()
    writers = []
    for _ in range(3):
        reader, writer = await client.connect()
        writer.write(client.head("/v1/completions", len(body)) + body)
        await reader.readline()
        writers.append(writer)
    begun = time.monotonic()
    code = await asyncio.to_thread(server.end, seconds=SHUTDOWN_S + IDLE_S)
    for writer in writers:
        writer.close()
    if code:
        raise EngineError(f"the server ended with exit code {code}: {server.last_lines}")
    return time.monotonic() - begun


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lean.eval.soak_server", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="length of the run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the clients (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=12, help="clients at once (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the curve, the counts and the verdict to FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run random clients against a server for some time; check its answers, its memory and its end."""
    args = _options(arguments)
    with tempfile.TemporaryDirectory() as folder:
        chat_model(Path(folder), args.seed)
        server = ServerProcess(Path(folder), *OPTIONS, key=KEY)
        try:
            count, curve = asyncio.run(load(server, args.clients, args.minutes, args.seed))
            check_quiet(server)
            seconds = asyncio.run(end_with_open_streams(server))
        finally:
            if not server.ended:
                server.end()
    for name, number in sorted(count.items()):
        print(f"{number:9} {name}")
    growth, words = verdict(curve) if args.minutes >= LEAST_MINUTES else (0.0, "too short to judge memory")
    print(f"all clients were answered, every block was given back, the server ended in {seconds:.1f} s; {words}")
    if args.json:
        report = {"growth": growth, "verdict": words, "clients": dict(sorted(count.items())), "curve": curve}
        write_result(args.json, (json.dumps(report, indent=1) + "\n").encode())
    if growth > GROWTH:
        raise EngineError(words)


if __name__ == "__main__":
    run_main(main)
