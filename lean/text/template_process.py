"""The parent's side of the process that renders chat templates: starting it, asking it, ending it."""

import atexit
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lean.errors import RequestError

HEADER = struct.Struct(">I")  # as in template_worker, which this process does not import: it needs jinja2
CPU_SECONDS = 2  # processor time of one rendering
WALL_SECONDS = 10  # until its reply: more than its processor time, as other processes may be busy
START_SECONDS = 60  # until the process is ready
LOOK_SECONDS = 1  # between two looks at whether the process still runs
MEMORY_MIB = 512  # address space of the process
MAX_CHARACTERS = 1_000_000  # of a rendering, beside those of the messages
MAX_TEMPLATE = 1_000_000  # characters of a template
MAX_REPLY_HEAD = 32_768  # bytes of a reply beside its text
MAX_ESCAPE = 12  # bytes of one character in JSON: two escaped surrogates
MIN_JINJA2 = (3, 1, 6)  # older sandboxes have known holes

_ENDED_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)


class TemplateError(Exception):
    """What the template itself raised."""


class _ProcessEnded(Exception):
    """The process ended in the middle of a request: by the signal ``number``, or with an exit code (None)."""

    def __init__(self, code: int) -> None:
        self.number = -code if code < 0 else None
        super().__init__(f"exit code {code}" if self.number is None else signal.Signals(self.number).name)


class Renderer:
    """One process that renders templates, started at the first rendering, and again after it was ended.

    Threads take turns. A fork of this process forgets its parent's renderer and starts its own when needed. The process
    ends with this one, as its socket closes then. (Linux could also send it a signal, but does so already when the
    thread that started it ends.) It has a session of its own, so that Ctrl-C on a terminal does not reach it.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process, and do not wait until it is ready. Raises RequestError if none can be started."""
        with self._lock:
            self._start()

    def stop(self) -> None:
        """End the process. The next rendering starts a new one."""
        with self._lock:
            self._stop()

    def stop_at_exit(self) -> None:
        """End the process unless a thread is waiting for it: it then ends when this one has ended."""
        if self._lock.acquire(timeout=0.5):
            try:
                self._stop()
            finally:
                self._lock.release()

    def forget_after_fork(self) -> None:
        """In a fork of this process: leave the renderer to the parent."""
        if self._socket is not None:
            self._socket.close()  # else the renderer would not see its parent end
        if self._process is not None:
            self._process.returncode = 0  # no child of this process: not to be waited for
        self._forget()

    def render(self, title: str, template: str, variables: dict[str, Any], written: int) -> str:
        """The text that a template makes of its variables.

        Args:
            title: names the template in errors.
            written: characters of the texts among the variables; a rendering may be that much longer, four times.

        Raises:
            TemplateError: the template raised an error.
            RequestError: it needs more than the process allows, or no process can be started.
        """
        if len(template) > MAX_TEMPLATE:
            raise RequestError(f"{title} has {len(template):,} characters: lean takes at most {MAX_TEMPLATE:,}")
        most = MAX_CHARACTERS + 4 * written
        request = json.dumps(
            {
                "template": template,
                "variables": variables,
                "seconds": CPU_SECONDS,
                "characters": most,
                "tz": os.environ.get("TZ"),
            }
        ).encode("ascii")
        reply = self._ask(title, HEADER.pack(len(request)) + request, MAX_REPLY_HEAD + MAX_ESCAPE * most)
        if "error" in reply:
            raise TemplateError(reply["error"])
        if "limit" in reply:
            raise RequestError(
                f"{title} needed more than {MEMORY_MIB} MiB of memory for this conversation"
                if reply["limit"] == "memory"
                else f"{title} wrote more than {most:,} characters for this conversation"
            )
        return reply["text"]

    def _ask(self, title: str, request: bytes, most: int) -> dict[str, str]:
        """The reply to a request, which is asked once more if something outside ended the process."""
        with self._lock:
            for again in (True, False):
                try:
                    return self._exchange(request, most)
                except TimeoutError:
                    raise RequestError(f"{title} was not rendered within {WALL_SECONDS} s") from None
                except _ProcessEnded as ended:
                    if ended.number == signal.SIGPROF:
                        raise RequestError(
                            f"{title} needed more than {CPU_SECONDS} s of processor time for this conversation"
                        ) from None
                    if not again or ended.number not in _ENDED_FROM_OUTSIDE:
                        raise RequestError(f"{title} ended the process that renders it ({ended})") from None
        raise AssertionError

    def _exchange(self, request: bytes, most: int) -> dict[str, str]:
        """Send a request and read its reply. After any exception, an interrupt too, the process is ended."""
        done = False
        try:
            self._start()
            self._wait_until_ready()
            deadline = time.monotonic() + WALL_SECONDS
            self._send(request, deadline)
            reply = self._receive(most, deadline)
            done = reply.get("limit") != "memory"  # what it used may stay in use
            return reply
        except (EOFError, ConnectionError):
            raise _ProcessEnded(self._stop(grace=1.0)) from None
        finally:
            if not done:
                self._stop()

    def _wait_until_ready(self) -> None:
        """Wait for the first reply of a new process."""
        if self._ready:
            return
        try:
            self._receive(MAX_REPLY_HEAD, time.monotonic() + START_SECONDS)
        except TimeoutError:
            raise RequestError(f"the process for chat templates was not ready within {START_SECONDS} s") from None
        except (EOFError, ConnectionError):
            code = self._stop(grace=1.0)
            if -code in _ENDED_FROM_OUTSIDE:
                raise _ProcessEnded(code) from None
            raise RequestError(f"the process for chat templates ended while it started (exit code {code})") from None
        self._ready = True

    def _send(self, data: bytes, deadline: float) -> None:
        assert self._socket is not None
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        self._socket.sendall(data, getattr(socket, "MSG_NOSIGNAL", 0))  # an error, whatever SIGPIPE does

    def _receive(self, most: int, deadline: float) -> dict[str, str]:
        assert self._socket is not None
        data, length = bytearray(), HEADER.size
        while len(data) < length:
            piece = self._piece(deadline)
            data += piece
            if length == HEADER.size <= len(data):
                length += HEADER.unpack_from(data)[0]
            if not piece or length > most:
                raise EOFError
        return json.loads(data[HEADER.size :])

    def _piece(self, deadline: float) -> bytes:
        """Bytes of a reply; none when the process has ended.

        The end of the socket alone would not tell: a process that another thread forked while this one was started may
        hold the other end of the pair.
        """
        assert self._socket is not None
        assert self._process is not None
        while True:
            ended = self._process.poll() is not None
            left = deadline - time.monotonic()
            self._socket.settimeout(0.001 if ended else max(0.001, min(LOOK_SECONDS, left)))
            try:
                return self._socket.recv(2**16)
            except TimeoutError:
                if ended:
                    return b""
                if left <= 0:
                    raise

    def _start(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._stop()
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("template_worker.py"))]
        command += [str(MEMORY_MIB * 2**20), *_jinja2_folders()]
        keep = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # the last two: where Python's own library may lie
        pair: tuple[socket.socket, ...] = ()
        try:
            ours, theirs = pair = socket.socketpair()
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in keep if name in os.environ},
                start_new_session=True,
            )
            # Beyond 2: where standard streams are closed, the pair may lie there.
            self._socket = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 3))
        except (OSError, ValueError) as error:  # ValueError: sys.executable is empty
            raise RequestError(f"cannot start the process that renders chat templates: {error}") from None
        finally:
            for one in pair:
                one.close()

    def _stop(self, grace: float = 0.0) -> int:
        """End the process unless it ends within ``grace`` seconds. Returns its exit code, as subprocess gives it."""
        self._ready = False
        process, self._process = self._process, None
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        if process is None:
            return 0
        if grace:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(grace)
        process.kill()
        return process.wait()


def _jinja2_folders() -> list[str]:
    """The folders that hold jinja2 and its dependency. Raises RequestError where jinja2 is missing or too old."""
    wanted = ".".join(map(str, MIN_JINJA2))
    try:
        found = version("jinja2")
        specs = [find_spec("jinja2"), find_spec("markupsafe")]
    except (PackageNotFoundError, ValueError):
        found, specs = "none", []
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin]
    if numbers < MIN_JINJA2 or len(folders) < 2:
        raise RequestError(f"chat templates need jinja2 {wanted} or newer, found {found}: pip install -U jinja2")
    return list(dict.fromkeys(folders))


RENDERER = Renderer()
atexit.register(RENDERER.stop_at_exit)
os.register_at_fork(after_in_child=RENDERER.forget_after_fork)
