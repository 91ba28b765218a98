"""Notices that a stream has said nothing for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Silence:
    """Calls ``wake`` when nothing has been said for ``seconds`` / 2 to ``seconds``, and again as long as that lasts.

    One timer looks at a flag now and then. A timer that starts anew with every frame would cost as much as the frame.
    """

    def __init__(self, seconds: float, wake: Callable[[], None]) -> None:
        self._period, self._wake = seconds / 2, wake
        self._said = True
        self._start()

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period, self._look)

    def _look(self) -> None:
        if not self._said:
            self._wake()
        self._said = False
        self._start()

    def end(self) -> None:
        """Something has been said."""
        self._said = True

    def stop(self) -> None:
        """The stream has ended."""
        self._timer.cancel()
