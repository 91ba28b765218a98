"""SIGINT and SIGTERM end the command within two seconds, also during a long call of a library."""

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from lean.cli.watcher import (
    DEADLY,
    END_AT_BOTH,
    END_AT_SIGINT,
    LINE,
    SPARE_BOTH,
    SPARE_SIGINT,
    Watcher,
    start_watcher,
)

INTERRUPTED = 130

_watcher: Watcher | None = None
_expected = _interrupted = _leaving = False
_held = threading.local()


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Code that continues after SIGINT must not continue after it."""


def stand_guard() -> None:
    """From now on both signals end the process: at once, and after `expect_interrupts` by KeyboardInterrupt.

    If the process has not ended two seconds later, the watcher ends it.

    A signal that the process ignores stays ignored: background jobs of a shell ignore SIGINT.
    """
    global _watcher
    heeded = [number for number in DEADLY if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, _interrupt)
    _watcher = start_watcher(INTERRUPTED) if heeded else None
    if _watcher is not None:
        signal.set_wakeup_fd(_watcher.news, warn_on_full_buffer=False)
    if heeded:
        os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=lambda: _forget(heeded))


def expect_interrupts() -> None:
    """From now on both signals raise KeyboardInterrupt: there is something to tidy up, or to print."""
    global _expected
    _expected = True
    sys.unraisablehook = _unraisable


def _unraisable(failure: Any) -> None:
    """KeyboardInterrupt was raised in a place that has no caller, such as a weak reference's callback. Raise it again.

    Another thread does it, a moment later: raised here it would have no caller either.
    """
    if not _interrupted:
        sys.__unraisablehook__(failure)
    elif issubclass(failure.exc_type, KeyboardInterrupt):
        with suppress(RuntimeError):  # no thread is allowed: the watcher ends the process
            _thread.start_new_thread(_raise_soon, ())


def _raise_soon() -> None:
    time.sleep(0.02)
    _thread.interrupt_main()


def interrupted() -> bool:
    """Whether a signal arrived that must end the process. Libraries may turn KeyboardInterrupt into another error."""
    return _interrupted


def leave(code: int) -> NoReturn:
    """End the process: flush what was printed, run what libraries asked for, and do not wait for torch to be freed."""
    global _leaving
    _leaving = True
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code == INTERRUPTED:
        _end(code)
    if code:
        sys.unraisablehook = lambda failure: None  # the command has failed, and its line says why
    atexit._run_exitfuncs()
    _end(code)


def _end(code: int) -> NoReturn:
    """End the process at once. Output that is not flushed is lost."""
    if _watcher is not None:
        _watcher.dismiss()
    if code == INTERRUPTED:
        with suppress(OSError):
            os.write(2, LINE)
    os._exit(code)


def _hold() -> None:
    """Before a fork: hold signals back, so that none reaches the new process before `_forget`."""
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, DEADLY)


def _let_go() -> None:
    """After a fork: take the signals that were held back."""
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _forget(heeded: list[signal.Signals]) -> None:
    """In a fork of the process: its signals end it and nothing else. The watcher belongs to the parent."""
    global _watcher
    _watcher = None
    with suppress(ValueError):  # raised outside the main thread
        signal.set_wakeup_fd(-1)
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)
    _let_go()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    if _leaving or not _expected:
        _end(INTERRUPTED)
    raise Terminated if signum == signal.SIGTERM else KeyboardInterrupt


def _heed(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tell(news: int) -> None:
    if _watcher is not None:
        with suppress(OSError):
            os.write(_watcher.news, bytes([news]))


@contextmanager
def own_interrupt() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, and the code that catches it may continue."""
    _tell(SPARE_SIGINT)
    kept = signal.signal(signal.SIGINT, _heed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, kept)
        _tell(END_AT_SIGINT)


@contextmanager
def own_signals(call: Callable[[], object]) -> Iterator[None]:
    """SIGINT and SIGTERM call ``call`` in the main thread, and nothing else: the caller ends by itself.

    A signal that the process ignores stays ignored.
    """
    heeded = [number for number in DEADLY if signal.getsignal(number) is not signal.SIG_IGN]
    _tell(SPARE_BOTH)
    kept = {number: signal.signal(number, lambda signum, frame: call()) for number in heeded}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        _tell(END_AT_BOTH)


class Stop:
    """Whether SIGINT arrived."""

    def __init__(self) -> None:
        self.wanted = False


@contextmanager
def deferred_interrupt() -> Iterator[Stop]:
    """The first SIGINT is noted; the next one raises KeyboardInterrupt."""
    stop = Stop()

    def note(signum: int, frame: FrameType | None) -> None:
        if stop.wanted:
            _heed(signum, frame)
        stop.wanted = True

    with own_interrupt():
        signal.signal(signal.SIGINT, note)
        yield stop
