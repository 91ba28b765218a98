"""Tasks of lm-evaluation-harness on a loaded engine, and the ``lm_eval`` command with the model ``lean``."""

import io
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean.errors import UserError, run_main
from lean.eval.harness.cloze import TASKS_FOLDER
from lean.eval.harness.find import MISSING, load_tasks

if TYPE_CHECKING:
    from lean.eval.harness.model import LeanLM
    from lean.llm import LLM

_BOOTSTRAP = 1000  # samples for the standard error of metrics that have no formula for it


class Interrupted(KeyboardInterrupt):
    """The evaluation was interrupted. ``report()`` gives what `run_tasks` returns, of the answered items alone.

    The report has no groups; ``not_run`` names the tasks of which no item was answered.
    """

    def __init__(self, report: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.report = report


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
        tasks: names of lm-eval's tasks, ``lean_cloze``, names under include_path, or paths of YAML files.
        num_fewshot: examples before each item; None: as the task says.
        limit: number of items to run of each task, or a share of its items if below 1; None: all.
        include_path: a folder with more tasks.
        max_gen_toks, add_bos_token, progress: see `lean.eval.harness.model.LeanLM`.
        seed: of few-shot examples and sampling.

    Returns:
        JSON-ready values. ``tasks``: by name ``metrics`` (by name ``value``, ``stderr`` or null, ``higher_is_better``),
        ``num_fewshot``, ``num_items``, ``items_left``, ``version``, ``truncated``, and ``failed`` and ``encoded_apart``
        as of `lean.eval.harness.faults.Faults`. ``groups``: by name their ``metrics``. ``model``: engine options,
        cache, BOS rule, tokens scored. ``partial``: whether the run was interrupted. Also limit, seed, chat template
        and lm-eval's version.

    Raises:
        UserError: lm-eval is missing, a task is unknown, its data cannot be loaded, or the chat template refuses an
            item. EngineError: the model failed.
        Interrupted: by KeyboardInterrupt, after some items were answered.
    """
    with _quiet(progress):
        loaded, manager = load_tasks(tasks, include_path)
        import lm_eval
        from lm_eval import simple_evaluate

        from lean.eval.harness.items import named_items
        from lean.eval.harness.model import LeanLM

        options = {} if max_gen_toks is None else {"max_gen_toks": max_gen_toks}
        model = LeanLM(llm, add_bos_token=add_bos_token, progress=progress, **options)
        members = manager.load(loaded)["tasks"]
        run = {"limit": limit, "seed": seed, "apply_chat_template": apply_chat_template, "lm_eval": lm_eval.__version__}
        try:
            with named_items(members):
                found = simple_evaluate(
                    model,
                    tasks=loaded,
                    task_manager=manager,
                    num_fewshot=num_fewshot,
                    limit=limit,
                    log_samples=False,
                    apply_chat_template=apply_chat_template,
                    fewshot_as_multiturn=apply_chat_template,
                    bootstrap_iters=_BOOTSTRAP,
                    random_seed=seed,
                    numpy_random_seed=seed,
                    torch_random_seed=seed,
                    fewshot_random_seed=seed,
                )
        except KeyboardInterrupt:
            if not any(model.answers.items(task)[0] for task in members.values()):
                raise
            raise Interrupted(lambda: _plain(_partial_report(model, members) | run)) from None
    assert found is not None  # None only in worker processes
    return _plain({"partial": False} | _report(model, found, dict.fromkeys(found["configs"], 0)) | run)


def _partial_report(model: "LeanLM", tasks: dict[str, Any]) -> dict[str, Any]:
    """`_report` of the items that were answered before an interrupt."""
    from lean.eval.harness.answers import evaluate_answered

    items, left = {}, {}
    for name, task in tasks.items():
        answered, wanted = model.answers.items(task)
        if answered:
            items[name], left[name] = answered, wanted - len(answered)
    with _quiet(progress=False):
        found = evaluate_answered(model.answers, tasks, items, bootstrap_iters=_BOOTSTRAP)
    not_run = [name for name in tasks if name not in items]
    return {"partial": True} | _report(model, found, left) | {"not_run": not_run}


def _report(model: "LeanLM", found: dict[str, Any], left: dict[str, int]) -> dict[str, Any]:
    """Tasks, groups and model, from lm-eval's results. ``left``: by task, the items that were not answered."""
    tasks = {
        name: {
            "metrics": _metrics(name, found["results"][name], found),
            "num_fewshot": found["n-shot"].get(name),
            "num_items": found["n-samples"][name]["effective"],
            "items_left": left[name],
            "version": found["versions"].get(name),
            "truncated": model.truncated(name),
            **model.faults.report(name),
        }
        for name in found["configs"]
    }
    groups = {name: {"metrics": _metrics(name, values, found)} for name, values in found.get("groups", {}).items()}
    return {"tasks": tasks, "groups": groups, "model": model.get_model_info()}


def _metrics(name: str, values: dict[str, Any], found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """lm-eval's ``metric,filter`` and ``metric_stderr,filter`` as one entry per metric; filters stay in the name."""
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
    """A value as JSON can hold it: no NaN, no numpy, no other objects."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def check_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> None:
    """Load the tasks and their data, and drop them: errors show before a model is loaded.

    Raises UserError as `run_tasks` does.
    """
    with _quiet(progress=False):
        load_tasks(tasks, include_path)


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Hide lm-eval's output, without ``progress`` its bars too, and keep it from forking this process."""
    logger = logging.getLogger("lm_eval")
    level, pools = logger.level, os.environ.get("DISABLE_MULTIPROC")
    logger.setLevel(logging.ERROR)
    os.environ["DISABLE_MULTIPROC"] = "1"  # for its bootstrap
    try:
        with redirect_stdout(io.StringIO()), nullcontext() if progress else redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        del os.environ["DISABLE_MULTIPROC"]
        if pools is not None:
            os.environ["DISABLE_MULTIPROC"] = pools


def main() -> None:
    """The ``lm_eval`` command with the model ``lean``; without --include_path also with the task ``lean_cloze``."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        raise UserError(MISSING) from None
    import sys

    import lean.eval.harness.model  # noqa: F401  # registers the model

    args = sys.argv[1:]
    if "--tasks" in args and not any(arg.startswith("--include_path") for arg in args):
        sys.argv += ["--include_path", str(TASKS_FOLDER)]
    cli_evaluate()


if __name__ == "__main__":
    run_main(main)
