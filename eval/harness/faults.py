"""Requests that were not handled as usual, counted by item."""

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from lm_eval.api.instance import Instance

from lean.errors import LeanError, one_line

log = logging.getLogger("lean")

Kind = Literal["failed", "encoded_apart"]
_WORDS: dict[Kind, str] = {
    "failed": "could not be run, and count as wrong answers",
    "encoded_apart": "have a context and a continuation that merge into one token, and were encoded apart",
}


class Faults:
    """The items of each task of which a request failed, or whose context and continuation were encoded apart."""

    def __init__(self) -> None:
        self._found: dict[Kind, dict[tuple[str, Hashable], str]] = {kind: {} for kind in _WORDS}
        self._said: dict[Kind, int] = dict.fromkeys(_WORDS, 0)

    def note(self, kind: Kind, request: Instance, why: object) -> None:
        """Count the item of a request. ``why`` is kept for the first request of an item."""
        found = self._found[kind]
        doc = len(found) if request.doc_id is None else request.doc_id
        found.setdefault((request.task_name or "", doc), one_line(why, 200))

    @contextmanager
    def of_call(self, requests: Sequence[Instance]) -> Iterator[dict[int, LeanError]]:
        """A place for the errors of one call's requests, by index.

        They are counted when the call ends or is interrupted, and logged when it ends. Where all requests failed, the
        first error is raised.
        """
        errors: dict[int, LeanError] = {}
        try:
            yield errors
            if requests and len(errors) == len(requests):
                raise errors[0]
        finally:
            for index, error in sorted(errors.items()):
                self.note("failed", requests[index], error)
        self._warn()

    def report(self, task: str | None = None) -> dict[str, dict[str, Any]]:
        """By kind, of a task or of all tasks: the number of items, and the first one in words, or None."""
        told = {}
        for kind, found in self._found.items():
            own = [f"{name} item {doc}: {why}" for (name, doc), why in found.items() if task in (None, name)]
            told[str(kind)] = {"items": len(own), "first": own[0] if own else None}
        return told

    def _warn(self) -> None:
        """Log what has been counted since the last call."""
        for kind, found in self._found.items():
            new = list(found.items())[self._said[kind] :]
            self._said[kind] = len(found)
            if new:
                (task, doc), why = new[0]
                log.warning("%d items %s; the first is %s item %s: %s", len(new), _WORDS[kind], task, doc, why)
