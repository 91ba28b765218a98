"""How lean calls transformers: its errors become one line, and what it prints does not reach the user."""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as hf_logging

from lean.errors import ModelError, one_line

T = TypeVar("T")

log = logging.getLogger("lean")

# Loggers whose warnings are about the files of a model, and say what lean does not find out by itself.
ABOUT_CONFIG = ("transformers.modeling_rope_utils",)
ABOUT_TOKENIZER = ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers")


def attempt(what: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function of a library, quietly. Its error becomes a ModelError of one line that begins with ``what``."""
    try:
        with quiet():
            return call(*args, **kwargs)
    except (ModelError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(f"{what}: {one_line(error, 300)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of libraries in Rust; it is no Exception
            raise
        raise ModelError(f"{what}: the library failed: {one_line(error, 200)}") from None


class _Listener(logging.Handler):
    """Stands in for the handlers of transformers' logger: keeps what one thread logs, and passes on the rest."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.logger, self.level_before = logger, logger.level
        self.handlers, self.propagated = list(logger.handlers), logger.propagate
        self.kept: dict[int, list[logging.LogRecord]] = {}  # by thread

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread in self.kept:
            self.kept[record.thread].append(record)
        elif record.levelno >= self.level_before:
            for handler in self.handlers:
                if record.levelno >= handler.level:
                    handler.handle(record)
            if self.propagated and self.logger.parent is not None:
                self.logger.parent.callHandlers(record)


_lock = threading.Lock()
_listener: _Listener | None = None  # while any thread is quiet
_bars: tuple[bool, bool] = (True, True)  # whether transformers and the hub showed progress bars before
_warnings: warnings.catch_warnings | None = None


@contextmanager
def quiet(what: str = "", relayed: tuple[str, ...] = ()) -> Iterator[None]:
    """Keep transformers from printing while this thread is inside: log lines, warnings, and progress bars.

    Warnings of the loggers ``relayed`` are logged by lean, once, after ``what``; not where an error ends it.

    The user's settings of transformers, of warnings and of progress bars are as before when the last thread has left.
    Meanwhile log lines of other threads are shown as always, but no thread shows transformers' progress bars or
    Python's warnings.
    """
    thread = threading.get_ident()
    with _lock:
        if _listener is None:
            _begin()
        assert _listener is not None
        inner = thread in _listener.kept
        records = _listener.kept.setdefault(thread, [])
    try:
        yield
    finally:
        with _lock:
            if not inner:
                del _listener.kept[thread]
            if not _listener.kept:
                _end()
    lines = (one_line(record.getMessage(), 300) for record in records if _is_of(record, relayed))
    for line in dict.fromkeys(lines):
        log.warning("%s: transformers says: %s", what, line)


def _begin() -> None:
    global _listener, _bars, _warnings
    logger = logging.getLogger("transformers")
    hf_logging.get_verbosity()  # sets up the logger where nobody has
    _listener = _Listener(logger)
    logger.handlers, logger.propagate = [_listener], False
    if logger.level > logging.WARNING:
        logger.setLevel(logging.WARNING)
    _bars = hf_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    hf_logging.disable_progress_bar()
    _warnings = warnings.catch_warnings()
    _warnings.__enter__()
    warnings.simplefilter("ignore")


def _end() -> None:
    global _listener, _warnings
    assert _listener is not None
    assert _warnings is not None
    logger = _listener.logger
    logger.handlers, logger.propagate = _listener.handlers, _listener.propagated
    logger.setLevel(_listener.level_before)
    _listener = None
    if _bars[0]:
        hf_logging.enable_progress_bar()
    (enable_progress_bars if _bars[1] else disable_progress_bars)()
    _warnings.__exit__(None, None, None)
    _warnings = None


def _is_of(record: logging.LogRecord, loggers: tuple[str, ...]) -> bool:
    return record.levelno >= logging.WARNING and record.name in loggers
