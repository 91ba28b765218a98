"""Errors of lm-eval's items, by task and item."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from lm_eval.api.task import Task

from lean.errors import RequestError


@contextmanager
def named_items(tasks: Mapping[str, Task]) -> Iterator[None]:
    """While active, a RequestError that arises while lm-eval writes the prompt of an item names the task and the item.

    lm-eval writes the prompts of all items in order, before it asks the model for anything.
    """
    for name, task in tasks.items():
        task.fewshot_context = partial(_written, name, count(), task.fewshot_context)
    try:
        yield
    finally:
        for task in tasks.values():
            del task.fewshot_context  # the method of the class remains


def _written(task: str, numbers: Iterator[int], write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    item = next(numbers)
    try:
        return write(*args, **kwargs)
    except RequestError as error:
        raise RequestError(f"{task} item {item}: {error}") from error
