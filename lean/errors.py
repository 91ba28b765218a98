"""The exceptions that lean raises on purpose. The command prints one as a line on stderr, and exits with its code."""

import sys
from collections.abc import Callable


class LeanError(Exception):
    """Base class. The message is one line: what happened, why, what to do."""

    exit_code = 1


class UserError(LeanError):
    """A flag, a prompt, a path or a checkpoint cannot be used."""

    exit_code = 2


class ConfigError(UserError):
    """A flag or option value, or a combination of them, is impossible."""


class ModelError(UserError):
    """A model cannot be found, is damaged, or is of a kind that lean does not support."""


class RequestError(UserError):
    """This engine can never serve the prompt or its sampling parameters."""


class EngineError(LeanError):
    """The engine failed: an error in a kernel, or a model that computes non-finite numbers."""


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main. Print a LeanError as one line on stderr, and exit with its code."""
    try:
        main()
    except LeanError as error:
        print(f"lean: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


EMPTY_PROMPT = "the prompt is empty: give some text"


def one_line(error: object, limit: int = 160) -> str:
    """An error of a library, or text that a user typed, as one line of at most ``limit`` characters."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= limit else line[: limit - 3] + "..."
