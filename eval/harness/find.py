"""Find tasks of lm-eval and their data within seconds, or say what is missing."""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean.errors import ConfigError, UserError, one_line
from lean.eval.harness.cloze import TASKS_FOLDER
from lean.store.source import HUB_TIMEOUT_S

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

MISSING = "lm-eval is not installed: pip install 'lean-inference[eval]'"


def load_tasks(tasks: Sequence[str], include_path: str | Path | None) -> tuple[list[Any], "TaskManager"]:
    """lm-eval's objects for the tasks, with their data, and the task manager that knows them.

    Raises UserError: lm-eval is missing, a task is unknown, or its data cannot be loaded.
    """
    if not tasks:
        raise ConfigError("no task given: try lean_cloze, which needs no download; `lm_eval ls tasks` lists others")
    if include_path and not Path(include_path).is_dir():
        raise ConfigError(f"include-path {str(include_path)!r} is not a folder")
    manager = find_tasks(tasks, str(include_path) if include_path else None)
    own = {path.stem for path in TASKS_FOLDER.glob("*.yaml")}
    loaded: list[Any] = []
    with nullcontext() if own.issuperset(tasks) else _no_retries():
        for name in tasks:
            try:
                found = manager.load([name])
            except Exception as error:  # from datasets, the hub, its HTTP library or the task's own code
                raise UserError(
                    f"task {name!r} cannot be loaded ({one_line(error)}): put its data on this machine (HF_HOME), "
                    "connect to the hub, or give a task over local files with --include-path; lean_cloze needs neither"
                ) from error
            group = found.get("groups", {}).get(name)
            loaded += [group] if group else list(found["tasks"].values())  # a tag gives several tasks
    return loaded, manager


def find_tasks(tasks: Sequence[str], include_path: str | None) -> "TaskManager":
    """A task manager of lm-eval that knows the tasks, and the members of tasks that are groups.

    By default lm-eval parses all of its 14,000 files, which takes more than 10 seconds. Here it parses only the folders
    whose files name a wanted task, then those of a group's members. All folders are parsed for a tag that several
    folders name, since lm-eval does not join such folders.
    """
    manager = _index(include_path, ())
    wanted = {name for name in tasks if not _is_known(manager, name)}
    folders: set[Path] = set()
    asked: set[str] = set()
    texts = _task_texts() if wanted else {}
    while wanted:
        named = re.compile(rb"(?<!\w)(?:" + b"|".join(re.escape(name.encode()) for name in wanted) + rb")(?!\w)")
        folders |= {folder for folder, text in texts.items() if named.search(text)}
        asked |= wanted
        outer = [folder for folder in folders if not folders.intersection(folder.parents)]  # includes inner folders
        manager = _index(include_path, tuple(sorted(outer, reverse=True)))  # of two tasks with one name the first wins
        wanted = {member for name in tasks for member in _members(manager, name)} - asked - manager.task_index.keys()
    entries = [manager.task_index.get(member) for name in tasks for member in _members(manager, name)]
    if len(folders) > 1 and any(entry and entry.yaml_path is None for entry in entries):
        manager = _index(include_path, (_lm_eval_tasks(),))
    for name in tasks:
        if not _is_known(manager, name):
            names = re.findall(rb"(?m)^(?:task|group):\s*([\w.-]+)", b"\n".join(texts.values()))
            near = difflib.get_close_matches(name, {*manager.all_tasks, *(found.decode() for found in names)}, n=3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise ConfigError(
                f"unknown task {one_line(name, 60)!r}: {hint}`lm_eval ls tasks` lists all, --include-path adds your own"
            )
    return manager


@lru_cache(maxsize=8)
def _index(include_path: str | None, folders: tuple[Path, ...]) -> "TaskManager":
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(MISSING) from None
    users = [Path(include_path)] if include_path else []  # last, so that it overrides the others
    return TaskManager(include_path=[*folders, TASKS_FOLDER, *users], include_defaults=False)


def _is_known(manager: "TaskManager", name: str) -> bool:
    return name in manager.task_index or (name.endswith((".yaml", ".yml")) and Path(name).is_file())


def _lm_eval_tasks() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


def _task_texts() -> dict[Path, bytes]:
    """lm-eval's folders of task files, each with the text of its files."""
    texts: dict[Path, bytes] = {}
    for path in _lm_eval_tasks().rglob("*.yaml"):
        texts[path.parent] = texts.get(path.parent, b"") + b"\n" + path.read_bytes()
    return texts


def _members(manager: "TaskManager", name: str) -> set[str]:
    """Names of all members of a group, including inner groups and their members."""
    names: set[str] = set()

    def walk(item: Any) -> None:
        if isinstance(item, dict):  # a task or group with changed settings
            walk(item.get("group"))
            walk(item.get("task"))
        elif isinstance(item, list):
            for part in item:
                walk(part)
        elif isinstance(item, str) and item not in names:
            names.add(item)
            entry = manager.task_index.get(item)
            walk(entry.cfg.get("task") if entry and entry.cfg and "group" in entry.cfg else None)

    walk(name)
    return names


@contextmanager
def _no_retries() -> Iterator[None]:
    """Work offline where the hub does not answer: its clients would retry for half a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    before = constants.HF_HUB_OFFLINE
    if not before:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
        except Exception:  # from the HTTP library, which differs between versions of the hub's client
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
