"""The answers to an evaluation of lm-eval as they come, and the figures of an interrupted one.

lm-eval gives figures for whole evaluations only. So the answered items are evaluated again, alone, by a model that
repeats their answers.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from lm_eval import evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task

_Key = tuple[str | None, int | None, int]  # task, item, number of the request within the item


class Answers:
    """Answers by request: several, where a task repeats its requests."""

    def __init__(self) -> None:
        self._found: defaultdict[_Key, list[Any]] = defaultdict(list)

    def note(self, request: Instance, answer: Any) -> None:
        self._found[request.task_name, request.doc_id, request.idx].append(answer)

    def of(self, task: str, item: int, number: int) -> list[Any]:
        return self._found.get((task, item, number), [])

    def items(self, task: Task) -> tuple[list[int], int]:
        """(the items of a task of which every request is answered, the number of all that are asked for)."""
        left: Counter[int] = Counter()
        for request in task.instances or ():
            have = len(self.of(request.task_name, request.doc_id, request.idx))
            left[request.doc_id] += max(0, (request.repeats or 1) - have)
        return sorted(item for item, missing in left.items() if not missing), len(left)


def evaluate_answered(answers: Answers, tasks: Mapping[str, Task], items: Mapping[str, list[int]], **how: Any) -> Any:
    """lm-eval's results of some items of tasks, all of them answered.

    Args:
        items: at least one of each task.
        how: more arguments of `lm_eval.evaluate`.
    """
    chosen = {"tasks": {name: tasks[name] for name in items}, "groups": {}}
    return evaluate(lm=_Repeating(answers, items), task_dict=chosen, samples=dict(items), log_samples=False, **how)


class _Repeating(LM):
    """Gives known answers. lm-eval numbers the items of a selection anew; ``items`` has their numbers by task."""

    def __init__(self, answers: Answers, items: Mapping[str, list[int]]) -> None:
        super().__init__()
        self._answers, self._items = answers, items

    def _repeat(self, requests: list[Instance]) -> list[Any]:
        turns: Counter[_Key] = Counter()
        found = []
        for request in requests:
            key = (request.task_name, self._items[request.task_name][request.doc_id], request.idx)
            found.append(self._answers.of(*key)[turns[key]])
            turns[key] += 1
        return found

    loglikelihood = loglikelihood_rolling = generate_until = _repeat
