"""A second, tiny process that ends this one after a signal, where this one does not end by itself.

Python code runs only while it holds the interpreter's lock. A single call of a library can keep that lock for seconds
or minutes, for example while it opens a large library, and then neither a handler nor a thread of Python runs. Python's
handler in C runs all the same: it writes the number of the signal into a pipe. The second process reads that pipe,
waits, and orders the first one to end. It is forked before libraries are imported, so it costs a millisecond and shares
memory with the first one.
"""

import _thread
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

ORDER_S, KILL_S = 1.5, 2.5  # seconds after a signal
# Written into the pipe in place of a signal's number.
SPARE_SIGINT, END_AT_SIGINT = 200, 201
SPARE_BOTH, END_AT_BOTH = 202, 203
LINE = b"lean: interrupted\n"

DEADLY = (signal.SIGINT, signal.SIGTERM)


class Watcher(NamedTuple):
    """The process id of the watcher; where news for it are written; where its order to end is read."""

    pid: int
    news: int
    order: int

    def dismiss(self) -> None:
        """End the watcher and wait for it: it holds standard error, and would stay as a zombie."""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def start_watcher(code: int) -> Watcher | None:
    """Fork the watcher; its order ends this process with an exit code. None where no process or file is allowed."""
    parent = os.getpid()
    pipes: list[int] = []
    try:
        pipes += os.pipe()
        pipes += os.pipe()
        pid = os.fork()
    except OSError:
        for descriptor in pipes:
            os.close(descriptor)
        return None
    news, sender, order, teller = pipes
    if not pid:
        os.close(sender)
        os.close(order)
        _watch(parent, news, teller)
    os.close(news)  # but not `teller`: the end of a watcher is no order
    os.set_blocking(sender, False)  # the handler in C must never wait
    if not _end_in_c(order, code):
        with suppress(RuntimeError):  # no thread is allowed
            _thread.start_new_thread(_end_in_python, (order, code))
    return Watcher(pid, sender, order)


class _ReadRequest(ctypes.Structure):
    """`struct aiocb` of Linux, 64 bits: https://man7.org/linux/man-pages/man7/aio.7.html"""

    _fields_ = (
        ("descriptor", ctypes.c_int),
        ("operation", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("argument", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * 256),
    )


_SIGEV_THREAD = 2
_pending: list[object] = []  # the C library uses this memory until the process ends


def _end_in_c(order: int, code: int) -> bool:
    """Let the C library read the order, and call _exit then: that needs no lock of Python. False where it cannot."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    try:
        library = ctypes.CDLL(None)
        buffer = ctypes.create_string_buffer(1)
        request = _ReadRequest(
            descriptor=order,
            buffer=ctypes.addressof(buffer),
            size=1,
            argument=code,
            notify=_SIGEV_THREAD,
            function=ctypes.cast(library._exit, ctypes.c_void_p).value,
        )
        _pending[:] = [buffer, request]
        return library.aio_read(ctypes.byref(request)) == 0
    except (OSError, AttributeError):
        return False


def _end_in_python(order: int, code: int) -> None:
    if os.read(order, 1):
        os._exit(code)


def _watch(parent: int, news: int, teller: int) -> NoReturn:
    """The watcher. It ends when the other end of ``news`` is closed, so it does not outlive the process."""
    try:
        for number in (*DEADLY, signal.SIGHUP, signal.SIGQUIT):  # the terminal sends them to both processes
            signal.signal(number, signal.SIG_IGN)
        _let_go(news, teller)
        _wait(news, order=lambda: os.write(teller, b"!"), kill=lambda: os.kill(parent, signal.SIGKILL))
    finally:
        os._exit(0)


def _let_go(*kept: int) -> None:
    """Close every other descriptor but standard error: whoever reads the other end of a pipe waits for its end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    low = 3
    for descriptor in sorted(kept):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, 1024)


def _wait(news: int, order: Callable[[], object], kill: Callable[[], object]) -> None:
    """Read news until the end. `ORDER_S` seconds after a deadly signal: order; `KILL_S` seconds after it: kill."""
    since: dict[int, float] = {}
    spared: set[int] = set()
    ordered = False
    told = {SPARE_SIGINT: (signal.SIGINT,), END_AT_SIGINT: (signal.SIGINT,), SPARE_BOTH: DEADLY, END_AT_BOTH: DEADLY}
    while True:
        due = min(since.values()) + (KILL_S if ordered else ORDER_S) if since else None
        if select.select([news], [], [], None if due is None else max(0.0, due - time.monotonic()))[0]:
            numbers = os.read(news, 64)
            if not numbers:
                return
            for number in numbers:
                if number in told:
                    change = spared.update if number in (SPARE_SIGINT, SPARE_BOTH) else spared.difference_update
                    change(told[number])
                    for signal_number in told[number]:
                        since.pop(signal_number, None)
                elif number in DEADLY and number not in spared:
                    since.setdefault(number, time.monotonic())
        elif ordered:
            kill()
            return
        else:
            with suppress(OSError):
                os.write(2, LINE)
            order()
            ordered = True
