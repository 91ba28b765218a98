"""SIGINT and SIGTERM end the command within two seconds, wherever it is."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

GRACE_S = 1.5
INTERRUPTED = 130

_deadly: set[int] = set()  # signals after which the process may not go on
_arrived = _heeded = 0  # signals that came; those that somebody took who may go on


def leave() -> NoReturn:
    """End the process at once; what was printed and flushed is printed."""
    os.write(2, b"lean: interrupted\n")
    os._exit(INTERRUPTED)


def _leave_unless_heeded(arrived: int) -> None:
    """Whatever the main thread is in, e.g. a library's long call."""
    if _heeded < arrived:
        leave()


def _watch(arrivals: int) -> None:
    """Python runs signal handlers between two of its own instructions only; this thread hears of them at once."""
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
    """Both signals raise KeyboardInterrupt, and end the process where that takes too long."""
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
    """SIGINT raises KeyboardInterrupt, and whoever catches it may go on."""
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
    """The first SIGINT only sets the event; the next one interrupts."""
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
