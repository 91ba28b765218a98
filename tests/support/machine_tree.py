"""Fake trees of system files: control groups of both versions, limits of the process, memory of the machine."""

from pathlib import Path

MIB = 2**20
UNIFIED = "cgroup2 cgroup2 rw"


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Write ``files`` (path below the root -> text). Returns the root."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def mount(folder: str, kind: str = UNIFIED, top: str = "/") -> str:
    """A line of mountinfo: the group ``top`` of a hierarchy appears at ``folder``."""
    return f"31 23 0:28 {top} {folder} rw,relatime shared:4 - {kind}\n"


def unified(root: Path, path: str, files: dict[str, str], *, top: str = "/") -> Path:
    """A machine with version 2 alone. ``path``: the process's group. Names of ``files`` lie below /sys/fs/cgroup."""
    return write_tree(
        root,
        {
            "proc/self/cgroup": f"0::{path}\n",
            "proc/self/mountinfo": mount("/proc", "proc proc rw") + mount("/sys/fs/cgroup", top=top),
        }
        | {f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    )


def version_1(root: Path, path: str, files: dict[str, str], *, top: str = "/") -> Path:
    """A machine with version 1: cpu and cpuacct share a hierarchy, memory has its own."""
    return write_tree(
        root,
        {
            "proc/self/cgroup": f"5:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:/other\n",
            "proc/self/mountinfo": mount("/sys/fs/cgroup/memory", "cgroup cgroup rw,memory", top)
            + mount("/sys/fs/cgroup/cpu,cpuacct", "cgroup cgroup rw,cpu,cpuacct", top),
        }
        | {f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    )
