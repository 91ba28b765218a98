"""The command `lean` in a process of its own, with streams that are closed, full, or without a reader."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

KINDS = ("closed", "full", "pipe without reader", "socket without reader")
GONE = KINDS[2:]


def as_in_a_shell(closed: tuple[int, ...] = ()) -> Callable[[], None]:
    """For preexec_fn: background jobs ignore SIGINT, and children inherit that. ``closed``: descriptors to close."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for descriptor in closed:
            os.close(descriptor)

    return prepare


def _stream(kind: str | None, opened: ExitStack) -> Any:
    """What subprocess takes for a stream of that kind; None captures it."""
    if kind is None:
        return subprocess.PIPE
    if kind == "full":
        return opened.enter_context(open("/dev/full", "w"))
    if kind == "pipe without reader":
        reader, writer = os.pipe()
        os.close(reader)
        opened.callback(os.close, writer)
        return writer
    if kind == "socket without reader":
        here, there = socket.socketpair()
        there.close()
        return opened.enter_context(here)
    return subprocess.DEVNULL  # and closed before the command starts


def lean(
    *arguments: str, stdin: str | None = None, stdout: str | None = None, stderr: str | None = None, **options: Any
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command; a stream that has one of the KINDS gives no text."""
    closed = tuple(number for number, kind in enumerate((stdin, stdout, stderr)) if kind == "closed")
    with ExitStack() as opened:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "lean", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=_stream(stdout, opened),
            stderr=_stream(stderr, opened),
            preexec_fn=as_in_a_shell(closed),
            timeout=120,
            check=False,
            **options,
        )
    return ended.returncode, (ended.stdout or b"").decode(), (ended.stderr or b"").decode()
