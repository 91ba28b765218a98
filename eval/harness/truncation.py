"""What lost tokens because it was too long for the engine, counted by item."""

import logging
from collections.abc import Hashable

from lm_eval.api.instance import Instance

log = logging.getLogger("lean")


class Truncation:
    """Cuts token ids on the left, and counts the cut items of each task."""

    def __init__(self) -> None:
        self._dropped: dict[tuple[str, Hashable], int] = {}  # (task, document) -> most tokens that one request lost

    def cut(self, request: Instance, ids: list[int], room: int) -> list[int]:
        """The last ``room`` tokens; dropped tokens are counted for the request's item."""
        item = (request.task_name or "", len(self._dropped) if request.doc_id is None else request.doc_id)
        self._dropped[item] = max(self._dropped.get(item, 0), len(ids) - room, 0)
        return ids[-room:]

    def tasks(self) -> list[str]:
        """Names of the tasks with counted items."""
        return list(dict.fromkeys(task for task, _ in self._dropped))

    def report(self, task: str | None = None) -> dict[str, int]:
        """Items of a task, or of all tasks: number cut, number in all, and the most tokens that one item lost."""
        lost = [dropped for (name, _), dropped in self._dropped.items() if task in (None, name)]
        return {"items": sum(map(bool, lost)), "of": len(lost), "max_tokens_dropped": max(lost, default=0)}

    def warn(self) -> None:
        """Log the counts of all tasks if any item was cut."""
        cut = self.report()
        if cut["items"]:
            log.warning(
                "%d of %d items truncated (max %d tokens dropped)", cut["items"], cut["of"], cut["max_tokens_dropped"]
            )
