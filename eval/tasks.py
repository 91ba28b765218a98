"""Tasks of lm-evaluation-harness on an engine that is already loaded, and the ``lm_eval`` command with lean in it."""

import difflib
import io
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean.errors import ConfigError, UserError, one_line, run_main
from lean.eval.cloze import TASKS_FOLDER
from lean.hub import HUB_TIMEOUT_S

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from lean.engine import LLM

MISSING = "lm-eval is not installed: pip install 'lean-inference[eval]'"


def run_tasks(
    llm: "LLM",
    tasks: Sequence[str],
    num_fewshot: int | None = None,
    limit: int | float | None = None,
    include_path: str | Path | None = None,
    *,
    apply_chat_template: bool = False,
    max_gen_toks: int | None = None,
    add_bos_token: bool | None = None,
    seed: int = 1234,
    progress: bool = False,
) -> dict[str, Any]:
    """Run tasks through the engine's cache.

    Args:
        llm: the engine; a sweep makes several of one `LoadedModel`.
        tasks: names of lm-eval, ``lean_cloze``, names under include_path, or paths of YAML files.
        num_fewshot: examples before each item; None: as the task says.
        limit: only the first so many items of each task, or that share of them if below 1.
        include_path: a folder with more tasks.
        max_gen_toks, add_bos_token, progress: see `lean.eval.lm_eval_model.LeanLM`.
        seed: of few-shot examples and sampling.

    Returns:
        What JSON can hold: ``tasks``, by name ``metrics`` (by name ``value``, ``stderr`` or null,
        ``higher_is_better``), ``num_fewshot``, ``num_items``, ``version``, ``truncated``; ``groups``, by name their
        ``metrics``; ``model``: engine options, cache, BOS rule, tokens scored; and how it was run.

    Raises:
        UserError: lm-eval is missing, a task is unknown, or its data cannot be had. EngineError: the model failed.
    """
    with _quiet(progress):
        loaded, manager = _load(tasks, include_path)
        import lm_eval
        from lm_eval import simple_evaluate

        from lean.eval.lm_eval_model import LeanLM

        options = {} if max_gen_toks is None else {"max_gen_toks": max_gen_toks}
        model = LeanLM(llm, add_bos_token=add_bos_token, progress=progress, **options)
        found = simple_evaluate(
            model,
            tasks=loaded,
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=False,
            apply_chat_template=apply_chat_template,
            fewshot_as_multiturn=apply_chat_template,
            bootstrap_iters=1000,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    assert found is not None  # one process
    report = {
        "tasks": {name: _task_report(name, found) | {"truncated": model.truncated(name)} for name in found["configs"]},
        "groups": {
            name: {"metrics": _metrics(name, values, found)} for name, values in found.get("groups", {}).items()
        },
        "model": model.get_model_info(),
        "limit": limit,
        "seed": seed,
        "apply_chat_template": apply_chat_template,
        "lm_eval": lm_eval.__version__,
    }
    return _plain(report)


def _task_report(name: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "metrics": _metrics(name, found["results"][name], found),
        "num_fewshot": found["n-shot"].get(name),
        "num_items": found["n-samples"][name]["effective"],
        "version": found["versions"].get(name),
    }


def _metrics(name: str, values: dict[str, Any], found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """lm-eval's ``metric,filter`` and ``metric_stderr,filter`` to one entry per metric; a filter stays in its name."""
    metrics = {}
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = values.get(f"{metric}_stderr,{kind}")
        metrics[metric if kind == "none" else f"{metric},{kind}"] = {
            "value": value,
            "stderr": stderr if isinstance(stderr, float) else None,
            "higher_is_better": found["higher_is_better"].get(name, {}).get(metric),
        }
    return metrics


def _plain(value: Any) -> Any:
    """As JSON has it: no NaN, no numpy, no other objects."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


# --- finding tasks and their data ---


def check_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> None:
    """Load the tasks and their data and forget them: what is wrong with them is said before a model is read.

    Raises UserError as `run_tasks`.
    """
    with _quiet(progress=False):
        _load(tasks, include_path)


def _load(tasks: Sequence[str], include_path: str | Path | None) -> tuple[list[Any], "TaskManager"]:
    """lm-eval's objects for the tasks, with their data, and its manager that knows them."""
    if not tasks:
        raise ConfigError("no task given: lean_cloze needs no download, `lm_eval ls tasks` lists the others")
    if include_path and not Path(include_path).is_dir():
        raise ConfigError(f"include-path {str(include_path)!r} is no folder")
    manager = _manager(tasks, str(include_path) if include_path else None)
    own = {path.stem for path in TASKS_FOLDER.glob("*.yaml")}
    loaded: list[Any] = []
    with nullcontext() if own.issuperset(tasks) else _no_retries():
        for name in tasks:
            try:
                task = manager._load_spec(name)
            except Exception as error:  # of datasets, the hub, its HTTP library or the task's own code
                raise UserError(
                    f"task {name!r} cannot be loaded ({one_line(error)}): its data must be on this machine (HF_HOME) "
                    "or the hub in reach, or give a task over local files with --include-path; lean_cloze needs neither"
                ) from error
            loaded += task if isinstance(task, list) else [task]  # a tag stands for many
    return loaded, manager


def _manager(tasks: Sequence[str], include_path: str | None) -> "TaskManager":
    """A task manager of lm-eval that knows the tasks, and the members of those that are groups.

    lm-eval would parse all of its 14,000 files first, for 10 seconds and more. Here it gets the folders that name what
    is wanted; members of a group that lie elsewhere bring their folders in turn. All of them are read for a tag that
    several folders name, since lm-eval does not join those.
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
        outer = [folder for folder in folders if not folders.intersection(folder.parents)]  # read with all in them
        manager = _index(include_path, tuple(sorted(outer, reverse=True)))  # of two with one name the first counts
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
                f"unknown task {one_line(name, 60)!r}: {hint}`lm_eval ls tasks` lists all, --include-path adds yours"
            )
    return manager


@lru_cache(maxsize=8)
def _index(include_path: str | None, folders: tuple[Path, ...]) -> "TaskManager":
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(MISSING) from None
    own = [Path(include_path)] if include_path else []  # last: it may override
    return TaskManager(include_path=[*folders, TASKS_FOLDER, *own], include_defaults=False)


def _is_known(manager: "TaskManager", name: str) -> bool:
    return name in manager.task_index or (name.endswith((".yaml", ".yml")) and Path(name).is_file())


def _lm_eval_tasks() -> Path:
    import lm_eval

    return Path(lm_eval.__file__).parent / "tasks"


def _task_texts() -> dict[Path, bytes]:
    """lm-eval's folders of task files, and what the files in each hold."""
    texts: dict[Path, bytes] = {}
    for path in _lm_eval_tasks().rglob("*.yaml"):
        texts[path.parent] = texts.get(path.parent, b"") + b"\n" + path.read_bytes()
    return texts


def _members(manager: "TaskManager", name: str) -> set[str]:
    """Names of everything that a group holds, groups in it included."""
    names: set[str] = set()

    def walk(item: Any) -> None:
        if isinstance(item, dict):  # a task or group with settings of its own
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
    """Go by what is on this machine where the hub does not answer: its clients would retry for half a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    before = constants.HF_HUB_OFFLINE
    if not before:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
        except Exception:  # of the hub's HTTP library, which versions of the hub differ in
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """lm-eval's remarks, and without ``progress`` its bars, are not ours to show; nor is it to fork this process."""
    logger = logging.getLogger("lm_eval")
    level, pools = logger.level, os.environ.get("DISABLE_MULTIPROC")
    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"  # of its bootstrap
    try:
        with redirect_stdout(io.StringIO()), nullcontext() if progress else redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        del os.environ["DISABLE_MULTIPROC"]
        if pools is not None:
            os.environ["DISABLE_MULTIPROC"] = pools


def main() -> None:
    """The ``lm_eval`` command with the model ``lean`` in it, and ``lean_cloze`` too unless --include_path is given."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise UserError(MISSING) from None
    import sys

    import lean.eval.lm_eval_model  # noqa: F401  # registers it

    args = sys.argv[1:]
    if "--tasks" in args and not any(arg.startswith("--include_path") for arg in args):
        sys.argv += ["--include_path", str(TASKS_FOLDER)]
    cli_evaluate()


if __name__ == "__main__":
    run_main(main)
