"""The CPUs that this process may use."""

import os
from dataclasses import dataclass
from pathlib import Path

from lean.machine.control_group import group_folders, read, whole_number


@dataclass(frozen=True)
class Cpus:
    """What bounds the computing of this process.

    Attributes:
        online: CPUs of the machine.
        affinity: CPUs that the process may run on: those of its affinity, which lie in its control group's cpuset.
        quota: CPUs' worth of time that its control groups allow, e.g. 1.5; None: no quota.
    """

    online: int
    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """Threads, or processes, to compute with: at least 1. A quota is rounded to the nearest number.

        Rounded down, up to a third of the quota lies idle. Rounded up, threads stand still up to a quarter of the time.
        """
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota + 0.5)))


def find_cpus(root: Path = Path("/")) -> Cpus:
    """What the system allows now."""
    online = os.cpu_count() or 1
    try:
        affinity = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not Linux
        affinity = online
    quotas = [quota for folder in group_folders("cpu", root) if (quota := _quota(folder)) is not None]
    return Cpus(online, affinity, min(quotas, default=None))


def _quota(folder: Path) -> float | None:
    """The CPU time that one group may use in each period, divided by the period."""
    unified = read(folder / "cpu.max").split()
    times = unified or [read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")]
    if len(times) != 2:
        return None
    quota, period = whole_number(times[0]), whole_number(times[1])
    return quota / period if quota and period else None


def physical_cores(cpus: set[int], root: Path = Path("/")) -> int:
    """Cores among some CPUs: CPUs that share a core count once."""
    return len({read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or cpu for cpu in cpus})
