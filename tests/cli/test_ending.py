"""Every error ends as one line and the exit code of its kind; what nobody foresaw is kept for a report."""

import errno
import os
import sys
import tempfile

import pytest

from lean.cli.ending import run_to_end
from lean.cli.streams import OutputLost
from lean.errors import EngineError, ModelError


@pytest.fixture(autouse=True)
def _quiet(home, monkeypatch):
    monkeypatch.delenv("LEAN_TRACEBACK", raising=False)


@pytest.fixture
def end(capsys):
    """``end(error)`` -> (exit code, stderr) of a command that raises the error."""

    def ending(error):
        def command():
            raise error

        code = run_to_end(command)
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == bool(err)
        return code, err

    return ending


REFUSED = {
    errno.EMFILE: "too many open files",
    errno.EAGAIN: "no further thread",
    errno.ENOSPC: "no space left",
    errno.EROFS: "read-only",
    errno.EACCES: "permission denied",
    errno.ENOMEM: "out of memory",
}


@pytest.mark.parametrize("number", REFUSED, ids=errno.errorcode.get)
def test_what_the_system_refuses_is_no_bug(end, number):
    code, err = end(OSError(number, os.strerror(number), "some/file"))
    assert code == 1
    assert "internal" not in err
    assert REFUSED[number] in err


ERRORS = {
    "a model": (ModelError("no such model"), 2, "lean: no such model"),
    "the engine": (EngineError("the engine failed"), 1, "lean: the engine failed"),
    "memory": (MemoryError(), 1, "out of memory"),
    "memory for a library": (ImportError("x.so: failed to map segment from shared object"), 1, "out of memory"),
    "a noexec folder": (ImportError("failed to map segment from shared object: Not permitted"), 1, "internal"),
    "threads": (RuntimeError("can't start new thread"), 1, "ulimit -u"),
    "a full output": (OutputLost("cannot write to standard output: full"), 1, "standard output: full"),
    "no home": (RuntimeError("Could not determine home directory."), 2, "set HOME"),
    "no temporary folder": (FileNotFoundError(errno.ENOENT, "No usable temporary directory found"), 2, "TMPDIR"),
    "a missing package": (ModuleNotFoundError("No module named 'tqdm'", name="tqdm.auto"), 2, "pip install tqdm"),
    "a library's exit": (SystemExit("give up"), 1, "lean: give up"),
}  # fmt: skip


@pytest.mark.parametrize(("error", "code", "words"), ERRORS.values(), ids=ERRORS)
def test_an_error_ends_as_its_kind_says(end, error, code, words):
    found, err = end(error)
    assert found == code
    assert words in err


@pytest.mark.parametrize(("error", "code"), [(OutputLost("gone", gone=True), 0), (SystemExit(3), 3), (SystemExit(), 0)])
def test_these_ends_need_no_line(end, error, code):
    assert end(error) == (code, "")


def test_an_unforeseen_error_is_one_line_and_its_traceback_is_kept(end, home):
    code, err = end(KeyError("a key\nof two lines"))
    kept = home / "last-error.txt"
    assert code == 1
    assert err.startswith("lean: internal error, KeyError: ")
    assert str(kept) in err
    text = kept.read_text()
    assert text.startswith("lean ")
    assert "Traceback (most recent call last)" in text
    assert "test_ending.py" in text


def test_where_nothing_can_be_kept_the_line_says_how_to_print_the_traceback(end, home):
    home.write_text("a file in place of the folder")
    code, err = end(ValueError("x"))
    assert code == 1
    assert "LEAN_TRACEBACK=1" in err


def test_an_error_that_leaves_no_memory_to_describe_it_is_one_of_memory(end, monkeypatch):
    """Python can raise SystemError where memory ends."""

    def version(package):
        raise MemoryError

    monkeypatch.setattr("importlib.metadata.version", version)
    code, err = end(SystemError("error return without exception set"))
    assert code == 1
    assert "out of memory" in err
    assert "internal" not in err


def test_the_variable_prints_the_traceback_of_any_error(monkeypatch, capsys):
    monkeypatch.setenv("LEAN_TRACEBACK", "1")

    def command():
        raise ModelError("no such model")

    assert run_to_end(command) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "lean: no such model"


def test_a_working_directory_that_was_deleted_is_named(monkeypatch, tmp_path, capsys):
    """torch's libraries would end the process with a line of their own."""
    before = os.getcwd()
    gone = tempfile.mkdtemp(dir=tmp_path)
    os.chdir(gone)
    os.rmdir(gone)
    try:
        assert run_to_end(sys.exit) == 2
    finally:
        os.chdir(before)
    assert "the working directory no longer exists" in capsys.readouterr().err
