"""The device that lean runs on, and its free memory."""

import os
from pathlib import Path

import torch

from lean.errors import ConfigError

GPU_SHARE = 0.9
CPU_SHARE = 0.25


def choose_device(name: str) -> torch.device:
    """The device. ``auto`` is the first GPU, else the CPU. Raises ConfigError for a device that does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("lean runs on cpu and cuda")
        device = torch.empty(1, device=device).device  # with its index
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def _cgroup_free() -> int | None:
    """Bytes left under this process's memory limit (control group version 2); None without a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])  # page cache, e.g. of weights just read: the system frees it when needed
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _host_free() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no MemAvailable (macOS): assume half


def free_bytes(device: torch.device) -> int:
    """Free memory of a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(free for free in (_cgroup_free(), _host_free()) if free is not None)


def cache_share(device: torch.device) -> float:
    """The fraction of free memory that the KV cache takes by default."""
    return GPU_SHARE if device.type == "cuda" else CPU_SHARE
