"""Work that goes on beside an engine: jobs one after another in a thread of their own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from lean.errors import LeanError, one_line

log = logging.getLogger("lean")


class Behind:
    """Runs jobs. The first one that fails ends them, with a warning.

    The end of the program waits for the job that runs, and no further one begins.
    """

    def __init__(self, name: str, jobs: Iterable[Callable[[], None]]) -> None:
        """``name``: what the jobs do, for the warning."""
        self._name, self._jobs = name, jobs
        self._stopped = False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"lean: {name}")
        self._thread.start()

    def _run(self) -> None:
        for job in self._jobs:
            if self._stopped or not threading.main_thread().is_alive():
                return
            try:
                job()
            except Exception as error:
                self.failure = error
                text = str(error) if isinstance(error, LeanError) else f"{type(error).__name__}: {error}"
                log.warning("%s has failed, and steps stay as they are: %s", self._name, one_line(text))
                return

    @property
    def runs(self) -> bool:
        """Whether a job runs, or one will."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Begin no further job."""
        self._stopped = True

    def wait(self) -> None:
        """Return when no job runs any more. Raises what a job has raised."""
        self._thread.join()
        if self.failure is not None:
            raise self.failure
