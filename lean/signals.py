"""SIGINT and SIGTERM end the command within two seconds, wherever it is."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_S = 1.5
INTERRUPTED = 130


def _leave() -> None:
    """Whatever the main thread is in, e.g. a library's long call: what was printed is printed."""
    os.write(2, b"lean: interrupted\n")
    os._exit(INTERRUPTED)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    watchdog = threading.Timer(GRACE_S, _leave)
    watchdog.daemon = True
    watchdog.start()
    raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Both signals raise KeyboardInterrupt, and end the process where that takes too long."""
    kept = {}
    if threading.current_thread() is threading.main_thread():
        for name in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(name) is not signal.SIG_IGN:  # background jobs of a shell ignore SIGINT
                kept[name] = signal.signal(name, _interrupt)
    try:
        yield
    finally:
        for name, handler in kept.items():
            signal.signal(name, handler)


@contextmanager
def deferred_interrupt() -> Iterator[threading.Event]:
    """The first SIGINT only sets the event; the next one interrupts."""
    event = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        if event.is_set():
            _interrupt(signum, frame)
        event.set()

    kept = signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, kept)
