"""The exceptions lean raises on purpose. The CLI turns each into one line on stderr and its exit code."""

import sys
from collections.abc import Callable


class LeanError(Exception):
    """Base of all of them. The message is one line: what happened, why, what to do."""

    exit_code = 1


class UserError(LeanError):
    """Something given to lean cannot be used: a flag, a prompt, a path, a checkpoint."""

    exit_code = 2


class ConfigError(UserError):
    """A flag or option value, or a combination of them, is impossible."""


class ModelError(UserError):
    """A model cannot be found, is damaged, or is of a kind lean refuses."""


class RequestError(UserError):
    """A prompt or its sampling parameters can never be served by this engine."""


class EngineError(LeanError):
    """The engine itself failed: a kernel, or a model that computes non-finite numbers."""


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main; errors raised on purpose become one line and their exit code."""
    try:
        main()
    except LeanError as error:
        print(f"lean: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


EMPTY_PROMPT = "the prompt is empty: give some text"


def one_line(error: object, limit: int = 160) -> str:
    """An error of a library, or what a user typed, cut to fit into a message."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= limit else line[: limit - 3] + "..."
