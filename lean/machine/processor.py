"""The name of the CPU."""

import platform
from contextlib import suppress
from pathlib import Path


def cpu_name() -> str:
    """The model name as the system reports it, else the architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
