"""The number of threads of an engine on a CPU that others use too.

Threads that compute a step wait for each other. Where another program holds one of the CPUs, all wait for the thread
that shares it, and a step takes several times as long as its work. Fewer threads may then be faster. Nothing is
predicted: an engine that does not get its CPU tries one thread less for a moment, keeps what was faster, and tries
again later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import median

import torch

from lean.config import EngineConfig
from lean.threads import are_ours, lend_threads

log = logging.getLogger("lean.pace")

_WINDOW_S, _STEPS = 0.3, 8  # seconds, and steps, of one measurement
_OWN_CPU = 0.85  # share of the time below which the engine's thread does not get its CPU
_FASTER = 0.9  # a trial has won if its steps took at most this part of the time
_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 30.0  # before the next trial; it doubles with every one that was lost


def pace_of(config: EngineConfig, device: torch.device) -> Pace | None:
    """The `Pace` of an engine; None on a GPU, and where the user has set the number of threads."""
    threads = torch.get_num_threads()
    # Compiled code has its number of threads in it, and the compiler itself is a busy process beside the engine.
    if device.type != "cpu" or threads == 1 or config.threads is not None or config.compile or not are_ours():
        return None
    return Pace(threads, lend_threads, are_still=lambda number: torch.get_num_threads() == number)


class Pace:
    """Chooses the number of threads from the times of decode steps.

    Args:
        most: threads on a quiet machine.
        use: sets the number of threads.
        are_still: whether the number of threads is the one that was set last: else the program has set another.
        clock, own_clock: seconds, and CPU seconds of the engine's thread.
    """

    def __init__(
        self,
        most: int,
        use: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
        own_clock: Callable[[], float] = time.thread_time,
        are_still: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self._most, self._use, self._are_still = most, use, are_still
        self._clock, self._own_clock = clock, own_clock
        self._ended = False
        self.threads = most
        self._base: float | None = None  # seconds of a step before the trial that runs; None: none runs
        self._before = most  # threads before the trial
        self._pause, self._next_trial = _PAUSE_S, 0.0
        self._down = True  # which way to try first where both are possible; a lost trial turns it
        self.note: str | None = None  # what there is to say
        self.aloud = True  # False: the note is not logged; who prints an answer word by word shows it behind
        self._rows = 0
        self._begin()

    def _begin(self) -> None:
        """Begin a measurement."""
        self._steps: list[float] = []
        self._own = 0.0

    def start(self) -> tuple[float, float]:
        """Call it before a step. What it returns is for `end`."""
        return self._clock(), self._own_clock()

    def end(self, started: tuple[float, float], rows: int) -> None:
        """Call it after a decode step of ``rows`` sequences."""
        now = self._clock()
        if self._ended or not self._are_still(self.threads):
            self._ended = True
            return
        if rows != self._rows:  # steps of other sizes are not compared
            self._rows = rows
            self._give_up_trial()
            self._begin()
        self._steps.append(now - started[0])
        self._own += self._own_clock() - started[1]
        seconds = sum(self._steps)
        if len(self._steps) >= _STEPS and seconds >= _WINDOW_S:
            self._judge(median(self._steps), self._own / seconds, now)
            self._begin()

    def _judge(self, step: float, own_share: float, now: float) -> None:
        """Take a measurement into account: seconds of a step, and the share of it that the thread had a CPU."""
        if self._base is not None:
            self._end_trial(step, now)
        elif now >= self._next_trial:
            crowded = own_share < _OWN_CPU and self.threads > 1
            if crowded and (self._down or self.threads == self._most):
                self._try(self.threads - 1, step)
            elif self.threads < self._most:
                self._try(self.threads + 1, step)

    def _try(self, threads: int, base: float) -> None:
        self._before, self._base = self.threads, base
        self._set(threads)

    def _end_trial(self, step: float, now: float) -> None:
        base, self._base = self._base, None
        assert base is not None
        # More threads win a draw: they are faster once the machine is quiet.
        won = step <= base * (_FASTER if self.threads < self._before else 1.0)
        if won:
            self._pause = _PAUSE_S
            if self.threads < self._before and self.note is None:
                self.note = (
                    f"other programs use the CPUs: steps are computed with {self.threads} of {self._most} threads "
                    "while that is faster"
                )
                if self.aloud:
                    log.warning("%s", self.note)
        else:
            self._down = not self._down
            self._set(self._before)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        self._next_trial = now + self._pause

    def close(self) -> None:
        """Take all threads again, and try nothing more."""
        if not self._ended and self.threads < self._most and self._are_still(self.threads):
            self._set(self._most)
        self._ended = True

    def __del__(self) -> None:
        try:  # noqa: SIM105  the end of the program may have taken torch away, and contextlib too
            self.close()
        except Exception:
            pass

    def _give_up_trial(self) -> None:
        if self._base is not None:
            self._base = None
            self._set(self._before)

    def _set(self, threads: int) -> None:
        self.threads = threads
        self._use(threads)
