"""Compiling beside an engine that answers: a fork of the process fills torch's cache on disk.

torch's compiler changes torch while it traces (it replaces `torch.nn.Module.__call__`, for one), so that a thread of
this process cannot compile while another one computes. A fork has the model as it is, without a copy of its weights.
It computes with one thread: GNU's OpenMP has lost its threads there. The engine loads what it has compiled.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

from lean.errors import LeanError, one_line

log = logging.getLogger("lean")

_LONGEST = 1000  # characters of a reason
NICENESS = 2  # two thirds of the CPU time of an engine thread where both want all of it


def can_fork() -> bool:
    """Whether this system forks processes that compute."""
    return sys.platform == "linux"


def why(error: Exception) -> str:
    """The text that is shown for an error. An error that lean does not raise itself is shown with its type."""
    return str(error) if isinstance(error, LeanError) else f"{type(error).__name__}: {error}"


class Compiling:
    """A process that does jobs one after another, and says which are done. It ends with the object.

    Attributes:
        done: the names of the jobs that `look` has found done.
        failure: why a job, or the use of its result, failed; None: nothing has.
    """

    def __init__(self, jobs: Mapping[int, Callable[[], None]]) -> None:
        """``jobs``: by name, in order. They must not hold this object."""
        self.done: set[int] = set()
        self._jobs = set(jobs)
        self.failure: str | None = None
        _load_compiler()
        self._reading, writing = os.pipe()
        held, self._holding = os.pipe()  # the other process ends when nobody holds this end any more
        os.set_blocking(self._reading, False)
        self._rest = b""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _work(jobs, writing, held)
        os.close(writing)
        os.close(held)
        self._end = weakref.finalize(self, _end, pid, self._reading, self._holding)

    @property
    def runs(self) -> bool:
        """Whether jobs may still become done."""
        return self._end.alive

    def look(self, wait: bool = False) -> None:
        """Read what has been done meanwhile. ``wait``: until all jobs have ended."""
        while self.runs:
            os.set_blocking(self._reading, wait)
            try:
                text = os.read(self._reading, 4096)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + text).split(b"\n")
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
        if self.runs:
            self._end()
            if not self._jobs <= self.done:
                self.failure = self.failure or "the engine was closed before all decode steps were compiled"


def _end(pid: int, *descriptors: int) -> None:
    """End a process, and forget it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _load_compiler() -> None:
    """Load torch's compiler, and let it write code for the threads of this process, also in a fork of it."""
    import torch._dynamo
    from torch._inductor import compile_fx, config  # noqa: F401

    config.cpp.threads = torch.get_num_threads()


def _work(jobs: Mapping[int, Callable[[], None]], writing: int, held: int) -> NoReturn:
    """What the fork does."""
    code = 1
    try:
        os.setpgid(0, 0)  # the terminal interrupts the parent alone
        for deadly in (signal.SIGINT, signal.SIGTERM):
            signal.signal(deadly, signal.SIG_DFL)
        os.nice(NICENESS)
        # Sockets and locks belong to the parent.
        writing, held, nothing = (_moved(one) for one in (writing, held, os.open(os.devnull, os.O_RDWR)))
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        for number, own in ((3, writing), (4, held)):
            os.dup2(own, number)
        os.closerange(5, os.sysconf("SC_OPEN_MAX"))
        threading.Thread(target=_end_with_parent, args=(4,), daemon=True).start()
        for name, job in jobs.items():
            try:
                job()
            except Exception as error:
                os.write(3, f"!{one_line(why(error), _LONGEST)}\n".encode())
                break
            os.write(3, f"{name}\n".encode())
        code = 0
    finally:
        os._exit(code)


def _moved(descriptor: int) -> int:
    """A copy above those that get a place of their own."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 8)


def _end_with_parent(held: int) -> None:
    """End this process when the parent does not hold the other end of the pipe any more."""
    os.read(held, 1)
    os._exit(1)
