"""The name of the CPU, and what it can do."""

import platform
from contextlib import suppress
from pathlib import Path


def cpu_name() -> str:
    """The model name as the system reports it, else the architecture."""
    return _fact("model name") or platform.processor() or platform.machine()


def cpu_features() -> str:
    """The instruction sets that the system reports; empty where it reports none."""
    return _fact("flags", "Features")


def _fact(*names: str) -> str:
    """What the system says about the first CPU under one of these names."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""
