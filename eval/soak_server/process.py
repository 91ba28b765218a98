"""`lean serve` in a process of its own, as its users have it: to load it, to measure it, and to end it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from pathlib import Path

from lean.errors import EngineError

START_S = 300
_URL = re.compile(r"serving .* at (http://[^ ]*)/v1")


class ServerProcess:
    """A server that is ready.

    Args:
        model: folder of the checkpoint. options: of `lean serve`; the port is a free one unless they name one.
        key: the server's only key; empty: it has none.

    Attributes:
        address: host and port.
    """

    def __init__(self, model: Path, *options: str, key: str = "") -> None:
        self._key = key
        port = [] if any(option.startswith("--port") for option in options) else ["--port=0"]
        environment = {**os.environ, "LEAN_API_KEY": key} if key else dict(os.environ)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lean", "serve", str(model), *port, *options],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._lines: deque[str] = deque(maxlen=20)
        self._url = ""
        self._known = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._known.wait(START_S) or not self._url:
            self.end(signal.SIGKILL)
            raise EngineError(f"the server did not start: {' | '.join(self._lines)}")
        host, _, digits = self._url.removeprefix("http://").rpartition(":")
        self.address = host, int(digits)

    def _read(self) -> None:
        """Standard error, to its end."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip())
            if found := _URL.search(line):
                self._url = found[1]
                self._known.set()
        self._known.set()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def last_lines(self) -> str:
        """The last lines that the server wrote, as one."""
        return " | ".join(self._lines)

    def resident_bytes(self) -> int:
        """Resident memory of the process; 0 on a system other than Linux."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except OSError:
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def metrics(self) -> dict[str, float]:
        """Metrics by name without labels; the last one of each name."""
        request = urllib.request.Request(f"{self._url}/metrics", headers={"Authorization": f"Bearer {self._key}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.partition("{")[0]: float(value) for name, value in pairs}

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until nothing runs and every block is free. Raises EngineError if that does not happen."""
        end = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while True:
            found = self.metrics()
            left = {name: found[name] for name in names if found[name]}
            if not left:
                return
            if time.monotonic() > end:
                raise EngineError(f"the server is not idle {seconds:g} s after the last request: {left}")
            time.sleep(0.05)

    def end(self, by: signal.Signals = signal.SIGTERM, seconds: float = 60) -> int:
        """Send a signal; the exit code. Raises EngineError, and kills the server, if it does not end in time."""
        if not self.ended:
            self._process.send_signal(by)
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise EngineError(f"the server did not end within {seconds:g} s of {by.name}") from None
