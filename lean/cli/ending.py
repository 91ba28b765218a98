"""How a command ends: its exit code, and one line on standard error if it failed."""

import errno
import os
import sys
import traceback
from collections.abc import Callable

from lean.cli.signals import INTERRUPTED, interrupted
from lean.cli.streams import OutputLost
from lean.errors import LeanError, UserError, is_out_of_memory, one_line

TRACEBACK = "LEAN_TRACEBACK"  # the environment variable that prints the traceback of every error
FAILED = LeanError.exit_code
_LONGEST = 4000  # characters of an error

_OUT_OF_MEMORY = "out of memory: lower --kv-memory, --max-model-len or --prefill-chunk, or use a smaller model"
_NO_THREAD = "the system allows no further thread or process: end other programs, or raise the limit (ulimit -u)"
# What the system refuses: no mistake of lean, and the same command can succeed later.
_REFUSED = {
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine: end other programs",
    errno.EAGAIN: _NO_THREAD,
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file exceeds the largest size that is allowed (ulimit -f)",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "input or output error: the disk or another device failed",
    errno.ENOMEM: _OUT_OF_MEMORY,
}


def run_to_end(command: Callable[[], object]) -> int:
    """Run a command and flush what it printed. Its error becomes a line on standard error. Returns the exit code.

    A result of ``command`` that is a number is the exit code.
    """
    try:
        _require_working_directory()
        code = command()
        sys.stdout.flush()
    except BaseException as error:
        if interrupted() or isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        try:
            message, code = _told(error)
        except MemoryError:  # none is left to find out more about an error, which most likely came from that
            message, code = _OUT_OF_MEMORY, FAILED
        if message:
            print(f"lean: {one_line(message, _LONGEST)}", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _require_working_directory() -> None:
    """Libraries of torch end the process without a word of ours where it is missing."""
    try:
        os.getcwd()
    except OSError as error:
        why = "no longer exists" if isinstance(error, FileNotFoundError) else f"cannot be used ({error.strerror})"
        raise UserError(f"the working directory {why}: change to another one") from None


def _told(error: BaseException) -> tuple[str, int]:
    """What to say about an error, and the exit code; nothing is said if there is no message."""
    if isinstance(error, SystemExit):  # a library's; lean raises none
        return ("", error.code or 0) if isinstance(error.code, int | None) else (str(error.code), FAILED)
    if isinstance(error, OutputLost):
        return ("", 0) if error.gone else (str(error), FAILED)
    if isinstance(error, LeanError):
        return str(error), error.exit_code
    if hasattr(error, "format_message"):  # of the command line's parser
        context = getattr(error, "ctx", None)
        return f"{error.format_message()} (see {context.command_path if context else 'lean'} --help)", 2
    return _told_by_system(error) or (_told_as_bug(error), FAILED)


def _told_by_system(error: BaseException) -> tuple[str, int] | None:
    """Faults of the machine or of the environment, which any call can meet."""
    text = str(error)
    if is_out_of_memory(error):
        return _OUT_OF_MEMORY, FAILED
    if "can't start new thread" in text:
        return _NO_THREAD, FAILED
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] != "lean":
        package = error.name.split(".")[0]
        return f"the package {package} is missing: reinstall lean with pip, or run `pip install {package}`", 2
    if "Could not determine home directory" in text:
        return "there is no home folder: set HOME, or LEAN_HOME and HF_HOME, to a folder", 2
    if isinstance(error, OSError):
        if "No usable temporary directory" in text:
            return "there is no folder for temporary files: set TMPDIR to a folder that can be written", 2
        if error.errno in _REFUSED:
            place = f"{one_line(error.filename)}: " if isinstance(error.filename, str) else ""
            return f"{place}{_REFUSED[error.errno]}", FAILED
    return None


def _told_as_bug(error: BaseException) -> str:
    """The line for an error that nobody foresaw. Its traceback is kept in a file, since it may not come again."""
    line = f"internal error, {type(error).__name__}: {one_line(error)}"
    if os.environ.get(TRACEBACK):
        return f"{line}; please report it with the traceback above"
    if kept := _keep_traceback(error):
        return f"{line}; please report it with the traceback in {kept}"
    return f"{line}; run the command again with {TRACEBACK}=1 to print the traceback, and please report it"


def _keep_traceback(error: BaseException) -> str | None:
    """Write the traceback of the last internal error into lean's own folder. None where that cannot be done."""
    from lean.store.home import cache_dir, write_atomically

    try:
        file = cache_dir() / "last-error.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        head = f"lean {_version()}, Python {sys.version}\n"
        text = head + "".join(traceback.format_exception(error))
        write_atomically(file, text.encode("utf-8", "backslashreplace"))
    except (OSError, ValueError, RuntimeError, UserError):
        return None
    return str(file)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return f"{of('lean-inference')}, torch {of('torch')}, transformers {of('transformers')}"
