"""The control groups of this process: folders of files that limit a container, a service or a session.

Sources: https://man7.org/linux/man-pages/man7/cgroups.7.html,
https://man7.org/linux/man-pages/man7/cgroup_namespaces.7.html and
https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
"""

import re
from pathlib import Path
from typing import NamedTuple

UNIFIED = ""  # stands for version 2 where version 1 has the name of a controller


class _Mount(NamedTuple):
    """A mounted hierarchy: the group at its top (``root``), and the folder where that group appears."""

    controllers: tuple[str, ...]
    root: str
    folder: Path


def read(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # a name with a zero byte is a ValueError
        return ""


def whole_number(text: str) -> int | None:
    """A number of digits alone, as the system writes limits; None for anything else, e.g. ``max`` and ``-1``."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def group_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Folders of this process's control group and of all its ancestors that are visible.

    Args:
        controller: of version 1, e.g. ``cpu``. The folders of version 2 are listed too: a machine may use both.
    """
    paths, mounts = _paths(root), _mounts(root)
    folders: list[Path] = []
    for name in (controller, UNIFIED):
        if name in paths:
            folders += _folders(paths[name], [mount for mount in mounts if name in mount.controllers])
    return folders


def _paths(root: Path) -> dict[str, str]:
    """Controller -> path of this process's group in the controller's hierarchy."""
    paths: dict[str, str] = {}
    for line in read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator and path.startswith("/"):
            names = (
                [UNIFIED] if number == "0" and not controllers else [name for name in controllers.split(",") if name]
            )
            paths |= dict.fromkeys(names, path.removesuffix(" (deleted)"))
    return paths


def _mounts(root: Path) -> list[_Mount]:
    mounts = []
    for line in read(root / "proc/self/mountinfo").splitlines():
        before, separator, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(" "), after.split(" ")
        if not separator or len(fields) < 6 or kind not in ("cgroup", "cgroup2"):
            continue
        controllers = (UNIFIED,) if kind == "cgroup2" else tuple(rest[-1].split(",")) if rest else ()
        top, folder = _unescaped(fields[3]), _unescaped(fields[4])
        mounts.append(_Mount(controllers, top, root / folder.lstrip("/")))
    return mounts


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def _folders(path: str, mounts: list[_Mount]) -> list[Path]:
    """The group at ``path`` and its ancestors in the mounts that show it.

    A container may see other names than the host: then no mount shows the path, and the first mount is taken, whose
    top is the container's group. Of a path without a folder below that mount, leading names are left out until one is
    found; without any name it is the top itself.
    """
    found: list[Path] = []
    showing = [(mount, below) for mount in mounts if (below := _below(path, mount.root)) is not None]
    for mount, names in showing or [(mount, _names(path)) for mount in mounts[:1]]:
        names = [name for name in names if name != ".."]
        while names and not _is_folder(mount.folder.joinpath(*names)):
            del names[0]
        found += [mount.folder.joinpath(*names[:length]) for length in range(len(names), -1, -1)]
    return list(dict.fromkeys(found))


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _below(path: str, top: str) -> list[str] | None:
    """The names that lead from the group ``top`` to ``path``; None if it does not lie there."""
    names, above = _names(path), _names(top)
    below = names[len(above) :]
    return below if names[: len(above)] == above and ".." not in below else None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that is too long or has a zero byte; a folder that may not be entered
        return False
