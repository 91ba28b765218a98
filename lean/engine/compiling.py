"""Compiling beside an engine that answers: a fork of the process fills torch's cache on disk.

torch's compiler changes torch while it traces (it replaces `torch.nn.Module.__call__`, for one), so that a thread of
this process cannot compile while another one computes. A fork has the model as it is, without a copy of its weights.
It computes with one thread: GNU's OpenMP has lost its threads there. The engine loads what it has compiled.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from lean.errors import LeanError, one_line

log = logging.getLogger("lean")

NICENESS = 2  # two thirds of the CPU time of an engine thread where both want all of it


def can_fork() -> bool:
    """Whether this system forks processes that compute."""
    return sys.platform == "linux"


class Compiling:
    """A process that does jobs one after another, and says which are done.

    Attributes:
        done: the names of the jobs that `look` has found done.
        failure: why a job, or the use of its result, failed; None: nothing has.
    """

    def __init__(self, jobs: Mapping[int, Callable[[], None]]) -> None:
        """``jobs``: by name, in order."""
        self.done: set[int] = set()
        self._jobs = set(jobs)
        self.failure: str | None = None
        _load_compiler()
        self._reading, writing = os.pipe()
        self._rest = b""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pid: int | None = os.fork()
        if self._pid == 0:
            _work(jobs, writing, parent)
        os.close(writing)
        atexit.register(self.stop)

    @property
    def runs(self) -> bool:
        """Whether jobs may still become done."""
        return self._pid is not None

    def look(self, wait: bool = False) -> None:
        """Read what has been done meanwhile. ``wait``: until all jobs have ended."""
        while self._pid is not None and (wait or select.select([self._reading], [], [], 0)[0]):
            text = os.read(self._reading, 4096)
            *lines, self._rest = (self._rest + text).split(b"\\n")
            for line in lines:
                if line.startswith(b"!"):
                    self.fail(line[1:].decode(errors="replace"))
                else:
                    self.done.add(int(line))
            if not text:
                self._end()
                if self.failure is None and not self._jobs <= self.done:
                    self.fail("its process was ended from outside")

    def fail(self, reason: str) -> None:
        """Note and tell why a job has no result."""
        self.failure = reason
        log.warning("decode steps are not all compiled, and those run as before: %s", reason)

    def stop(self) -> None:
        """End the process. Nothing more becomes done."""
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._end()

    def _end(self) -> None:
        pid, self._pid = self._pid, None
        assert pid is not None
        os.close(self._reading)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        atexit.unregister(self.stop)


def _load_compiler() -> None:
    """Load torch's compiler, and let it write code for the threads of this process, also in a fork of it."""
    import torch._dynamo
    from torch._inductor import compile_fx, config  # noqa: F401

    config.cpp.threads = torch.get_num_threads()


def _work(jobs: Mapping[int, Callable[[], None]], writing: int, parent: int) -> NoReturn:
    """What the fork does."""
    code = 1
    try:
        os.setpgid(0, 0)  # the terminal interrupts the parent alone
        for deadly in (signal.SIGINT, signal.SIGTERM):
            signal.signal(deadly, signal.SIG_DFL)
        os.nice(NICENESS)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.dup2(writing, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # sockets and locks that belong to the parent
        for name, job in jobs.items():
            if os.getppid() != parent:
                break
            try:
                job()
            except Exception as error:
                text = str(error) if isinstance(error, LeanError) else f"{type(error).__name__}: {error}"
                os.write(3, f"!{one_line(text)}\\n".encode())
                break
            os.write(3, f"{name}\\n".encode())
        code = 0
    finally:
        os._exit(code)
