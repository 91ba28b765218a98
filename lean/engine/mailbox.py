"""Outputs on their way from a step to the callers that asked for them."""

from collections import deque

from lean.engine.request import RequestOutput


class Mailbox:
    """One box per request whose caller waits for its outputs, and one box for `Engine.step_outputs`.

    The engine's thread puts; any thread may take. Every operation on a box is atomic by itself.
    """

    def __init__(self) -> None:
        # None marks a request whose caller has left: its outputs are dropped until it ends.
        self._boxes: dict[int, deque[RequestOutput] | None] = {}
        self._rest: deque[RequestOutput] = deque()

    def __len__(self) -> int:
        """Number of boxes: of requests that a caller waits for, and of those left before they ended."""
        return len(self._boxes)

    @property
    def left(self) -> set[int]:
        """The requests that their callers have left before they ended."""
        return {request_id for request_id, box in list(self._boxes.items()) if box is None}

    @property
    def has_rest(self) -> bool:
        """Whether `take_rest` would return anything."""
        return bool(self._rest)

    def open(self, request_id: int) -> None:
        """A caller waits for this request. Before its first output."""
        self._boxes[request_id] = deque()

    def put(self, output: RequestOutput) -> None:
        """Deliver an output."""
        box = self._boxes.get(output.request_id, self._rest)
        if box is not None:
            box.append(output)

    def take(self, request_id: int) -> list[RequestOutput]:
        """The outputs of a request that was opened and has not been left."""
        return _drain(self._boxes[request_id])

    def take_rest(self) -> list[RequestOutput]:
        """The outputs of all requests that no caller waits for."""
        return _drain(self._rest)

    def leave(self, request_id: int) -> None:
        """The caller has left: drop its outputs, those that are here and those that follow."""
        self._boxes[request_id] = None

    def close(self, request_id: int) -> None:
        """The request has ended: no output comes after this. A caller that waits may still take its outputs."""
        if self._boxes.get(request_id, ()) is None:  # its caller has left
            self._boxes.pop(request_id, None)


def _drain(box: deque[RequestOutput] | None) -> list[RequestOutput]:
    outputs = []
    while box:
        outputs.append(box.popleft())
    return outputs
