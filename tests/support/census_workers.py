"""One process per item, limited in time and memory, so that what an item does reaches no other one."""

import multiprocessing
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MOST_BYTES = 8 << 30  # of data, per process


@dataclass
class _Running:
    item: str
    process: BaseProcess
    results: Connection
    started: float


def _work(function: Callable[[str], Any], item: str, log: Path, results: Connection) -> None:
    """In the child: what it prints goes to ``log``."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    results.send(function(item))


def _start(function: Callable[[str], Any], item: str, logs: Path) -> _Running:
    fork = multiprocessing.get_context("fork")  # the child has the parent's imports
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(function, item, logs / f"{item}.log", sender), daemon=True)
    process.start()
    sender.close()
    return _Running(item, process, receiver, time.monotonic())


def _finish(one: _Running, seconds: float) -> tuple[Any, str]:
    """(result, why there is none) of a process that has ended, has sent its result, or has had its time."""
    result, problem = None, ""
    try:
        if one.results.poll():
            result = one.results.recv()
        else:
            problem = f"did not finish in {seconds:g} s"
            one.process.kill()
    except EOFError:  # it ended without a result
        one.process.join()
        code = one.process.exitcode or 0
        problem = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    one.results.close()
    one.process.join(timeout=5)
    one.process.kill()
    one.process.join()
    return result, problem


def run_each(
    function: Callable[[str], Any], items: Iterable[str], logs: Path, *, jobs: int = 1, seconds: float = 300
) -> Iterator[tuple[str, Any, str, float]]:
    """Yield (item, what ``function`` returned, why it returned nothing, seconds) as the processes end.

    Args:
        jobs: processes at a time. seconds: most time of each. logs: folder for what they print, one file per item.
    """
    waiting, running = deque(items), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(function, waiting.popleft(), logs))
            oldest = min(one.started for one in running)
            wait([one.results for one in running], timeout=max(0.0, oldest + seconds - time.monotonic()))
            now = time.monotonic()
            for one in [one for one in running if one.results.poll() or now - one.started >= seconds]:
                running.remove(one)
                result, problem = _finish(one, seconds)
                yield one.item, result, problem, now - one.started
    finally:
        for one in running:
            one.process.kill()
            one.process.join()
