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


class KernelError(UserError):
    """A GPU kernel cannot be compiled or loaded. ``reason`` says why, ``mend`` what to do."""

    def __init__(self, reason: str, mend: str) -> None:
        super().__init__(reason, mend)
        self.reason, self.mend = reason, mend

    def __str__(self) -> str:
        return f"{self.reason}: {self.mend}"


class CompilerError(KernelError):
    """No GPU kernel at all can be compiled on this machine as it is."""


class EngineError(LeanError):
    """The engine failed: an error in a kernel, or a model that computes non-finite numbers."""


def run_main(main: Callable[[], None]) -> None:
    """Run a script's main. Print a LeanError as one line on stderr, and exit with its code."""
    try:
        main()
    except LeanError as error:
        print(f"lean: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or torch says that memory, of the host or of a device, has run out."""
    kind, text = type(error).__name__, str(error)
    if "failed to map segment from shared object" in text:  # a library is not loaded: also said of a noexec folder
        return "permi" not in text.lower()
    if isinstance(error, RuntimeError) and ("out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text):
        return True  # CUDA, Triton and cuBLAS have no exception of their own for it
    return isinstance(error, MemoryError) or "OutOfMemory" in kind or "t allocate memory" in text


EMPTY_PROMPT = "the prompt is empty: give some text"


def one_line(error: object, limit: int = 160) -> str:
    """An error of a library, or text that a user typed, as one line of at most ``limit`` characters.

    Characters that a terminal would not print, but obey, are escaped.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    line = text if text.isprintable() else "".join(map(_printable, text))
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def shown(value: object, limit: int = 160) -> str:
    """A value as Python writes it, on one line of at most ``limit`` characters."""
    try:
        return one_line(repr(value), limit)
    except ValueError:  # Python refuses to write out integers of thousands of digits
        return f"a value of type {type(value).__name__} that is too long to show"
