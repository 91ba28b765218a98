"""SIGINT and SIGTERM end the command within two seconds, also during a long call of a library."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

GRACE_S = 1.5
INTERRUPTED = 130

_deadly: set[int] = set()  # signals that must end the process
_arrived = _heeded = 0  # signals that arrived; signals that were handled by code that may continue


def leave() -> NoReturn:
    """End the process at once. Output that is not flushed is lost."""
    os.write(2, b"lean: interrupted\n")
    os._exit(INTERRUPTED)


def _leave_unless_heeded(arrived: int) -> None:
    """Runs in a timer's thread: the main thread may be inside a long call of a library."""
    if _heeded < arrived:
        leave()


def _watch(arrivals: int) -> None:
    """Start a timer for each signal. Python runs handlers only between bytecodes; this thread sees signals at once."""
    global _arrived
    while numbers := os.read(arrivals, 64):
        _arrived += len(numbers)
        if _deadly.intersection(numbers):
            watchdog = threading.Timer(GRACE_S, _leave_unless_heeded, (_arrived,))
            watchdog.daemon = True
            watchdog.start()
    os.close(arrivals)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _heed(signum: int, frame: FrameType | None) -> None:
    global _heeded
    _heeded += 1
    raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Both signals raise KeyboardInterrupt. If the process has not ended after GRACE_S seconds, it is ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {}
    arrivals, sender = os.pipe()
    os.set_blocking(sender, False)
    before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # background jobs of a shell ignore SIGINT
            kept[number] = signal.signal(number, _interrupt)
            _deadly.add(number)
    threading.Thread(target=_watch, args=(arrivals,), daemon=True).start()
    try:
        yield
    finally:
        _deadly.clear()
        signal.set_wakeup_fd(before)
        for number, handler in kept.items():
            signal.signal(number, handler)
        os.close(sender)  # ends the thread


@contextmanager
def own_interrupt() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, and the code that catches it may continue."""
    deadly = signal.SIGINT in _deadly
    _deadly.discard(signal.SIGINT)
    kept = signal.signal(signal.SIGINT, _heed)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, kept)
        if deadly:
            _deadly.add(signal.SIGINT)


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """The first SIGINT sets the event; the next one raises KeyboardInterrupt."""
    event = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        global _heeded
        if event.is_set():
            _heed(signum, frame)
        _heeded += 1
        event.set()

    with own_interrupt():
        signal.signal(signal.SIGINT, note)
        yield event
