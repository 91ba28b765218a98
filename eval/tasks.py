"""Tasks of lm-evaluation-harness on an engine that is already loaded, and the ``lm_eval`` command with lean in it."""

import difflib
import io
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
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
    """lm-eval's task manager; without its own 14,000 files, which take seconds to read, where they are not wanted."""
    manager = _index(include_path, False)
    unknown = [name for name in tasks if not _is_known(manager, name)]
    if unknown:
        stems, text = _task_files()
        for name in unknown:  # what no YAML file names is refused before all of them are parsed
            if name.encode() not in text:
                _refuse(name, [*manager.all_tasks, *stems])
        manager = _index(include_path, True)
    for name in unknown:
        if not _is_known(manager, name):
            _refuse(name, manager.all_tasks)
    return manager


@lru_cache(maxsize=4)
def _index(include_path: str | None, include_defaults: bool) -> "TaskManager":
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(MISSING) from None
    folders: list[str | Path] = [TASKS_FOLDER, *([include_path] if include_path else [])]
    return TaskManager(include_path=folders, include_defaults=include_defaults)


def _is_known(manager: "TaskManager", name: str) -> bool:
    return name in manager.task_index or (name.endswith((".yaml", ".yml")) and Path(name).is_file())


def _task_files() -> tuple[list[str], bytes]:
    """Names of lm-eval's task files without suffix, and what they all hold."""
    import lm_eval

    paths = list((Path(lm_eval.__file__).parent / "tasks").rglob("*.yaml"))
    return [path.stem for path in paths], b"\n".join(path.read_bytes() for path in paths)


def _refuse(name: str, known: Sequence[str]) -> None:
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"unknown task {one_line(name, 60)!r}: {hint}`lm_eval ls tasks` lists all; --include-path DIR adds your own"
    )


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
    """lm-eval's remarks, and without ``progress`` its bars, are not ours to show."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with nullcontext() if progress else redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


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
