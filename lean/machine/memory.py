"""The memory that this process can still take, and what bounds it. Swap does not count."""

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

from lean.machine.control_group import group_folders, read, whole_number

_NO_LIMIT = 2**60  # version 1 writes the largest number of pages for "no limit"
_HOST = "the machine"
# Name -> the line of /proc/self/limits with the limit, and that of /proc/self/status with what is used.
_RESOURCES = {
    "RLIMIT_AS (ulimit -v)": ("Max address space", "VmSize"),
    "RLIMIT_DATA (ulimit -d)": ("Max data size", "VmData"),
}


@dataclass(frozen=True)
class MemoryBound:
    """What bounds memory: its name, its limit, and the bytes that are left under it."""

    name: str
    limit_bytes: int
    free_bytes: int


def memory_bounds(root: Path = Path("/")) -> list[MemoryBound]:
    """All bounds: the machine's memory first, then control groups and resource limits."""
    groups = [bound for folder in group_folders("memory", root) if (bound := _group_bound(folder)) is not None]
    return [_host_bound(root), *groups, *_resource_bounds(root)]


def tightest_bound(root: Path = Path("/")) -> MemoryBound:
    """The bound that leaves the fewest bytes."""
    return min(memory_bounds(root), key=lambda bound: bound.free_bytes)


def give_back_freed() -> None:
    """Give the system the memory that this process has freed and glibc keeps. Nothing happens without glibc."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _host_bound(root: Path) -> MemoryBound:
    sizes = _sizes(root / "proc/meminfo")
    total = sizes.get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return MemoryBound(_HOST, total, sizes.get("MemAvailable", total // 2))  # no MemAvailable (macOS): assume half


def _sizes(path: Path) -> dict[str, int]:
    """Lines such as ``VmSize:   8192 kB``: name -> bytes."""
    return {name: int(number) * 1024 for name, number in re.findall(r"(?m)^(\w+):\s+([0-9]{1,20}) kB$", read(path))}


def _group_bound(folder: Path) -> MemoryBound | None:
    """The bound of one control group of either version.

    The page cache that was not used lately (e.g. of weights just read) counts as free: the system drops it on demand.
    """
    numbers = dict(re.findall(r"(?m)^(\w+) ([0-9]{1,20})$", read(folder / "memory.stat")))
    # Of version 1 the file memory.stat also knows the least limit of ancestors, visible or not.
    texts = [read(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    limits = [whole_number(text) for text in [*texts, numbers.get("hierarchical_memory_limit", "")]]
    limit = min((limit for limit in limits if limit is not None), default=_NO_LIMIT)
    if limit >= _NO_LIMIT:
        return None
    used = whole_number(read(folder / "memory.current") or read(folder / "memory.usage_in_bytes")) or 0
    droppable = int(numbers.get("total_inactive_file") or numbers.get("inactive_file") or 0)
    return MemoryBound(f"control group {folder}", limit, min(limit, max(0, limit - max(0, used - droppable))))


def _resource_bounds(root: Path) -> list[MemoryBound]:
    limits, used = read(root / "proc/self/limits"), _sizes(root / "proc/self/status")
    bounds = []
    for name, (title, size) in _RESOURCES.items():
        found = re.search(rf"(?m)^{title}\s+([0-9]{{1,20}})\s", limits)  # the soft limit; "unlimited" is no number
        if found and int(found[1]) < _NO_LIMIT:
            limit = int(found[1])
            bounds.append(MemoryBound(name, limit, max(0, limit - used.get(size, 0))))
    return bounds
