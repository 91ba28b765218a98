"""lean's own folder is where the environment says; locks exclude; a file is replaced whole or not at all."""

import os
import resource
import threading
import time
from pathlib import Path

import pytest

from lean.errors import LeanError, UserError
from lean.store import home as store_home
from lean.store.home import cache_dir, exclusive, write_atomically, write_result


def test_cache_dir_is_lean_home_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("LEAN_HOME", "~/lean")
    assert cache_dir() == tmp_path / "lean"
    monkeypatch.setenv("LEAN_HOME", "")
    assert cache_dir() == Path("/xdg/lean")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "lean"


def test_a_locked_file_refuses_with_the_error_of_the_caller(tmp_path):
    with (tmp_path / "file").open("w") as one, (tmp_path / "file").open("w") as other:
        exclusive(one)
        with pytest.raises(UserError, match="busy"):
            exclusive(other, refusal=UserError("busy"), waiting="not shown")
    with (tmp_path / "file").open("w") as again:
        exclusive(again, refusal=UserError("busy"))


@pytest.mark.parametrize("waiting", [None, "waiting ..."])
def test_a_locked_file_is_waited_for_where_nothing_refuses(tmp_path, capfd, waiting):
    held = []
    with (tmp_path / "file").open("w") as one, (tmp_path / "file").open("w") as other:
        exclusive(one)
        thread = threading.Thread(target=lambda: (exclusive(other, waiting=waiting), held.append(True)))
        thread.start()
        time.sleep(0.1)
        assert not held
        one.close()
        thread.join(10)
    assert held
    assert capfd.readouterr().err == ("" if waiting is None else f"{waiting}\n")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, step):
    file = tmp_path / "file.json"
    write_atomically(file, b"old")

    def fail(*_):
        raise OSError("full")

    monkeypatch.setattr(os if step == "fsync" else store_home.Path, step, fail)
    with pytest.raises(OSError, match="full"):
        write_atomically(file, b"new and longer")
    monkeypatch.undo()
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"


def test_a_user_without_a_home_folder_is_told_which_variable_to_set(monkeypatch):
    for name in ("HOME", "LEAN_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user who is not in the list of users
    with pytest.raises(UserError, match="set LEAN_HOME"):
        cache_dir()
    monkeypatch.setenv("LEAN_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere")


def test_a_result_that_does_not_fit_on_the_disk_leaves_the_old_file(tmp_path):
    file = tmp_path / "result.json"
    write_result(file, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(LeanError, match=r"result\.json: File too large") as caught:
            write_result(file, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.exit_code == 1
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize("name", ["no/such/folder", ".", "nul\0"])
def test_a_place_that_cannot_hold_a_result_is_a_mistake_of_the_user(tmp_path, name):
    with pytest.raises(UserError, match="cannot write"):
        write_result(tmp_path / name, b"x")


def test_a_result_goes_through_links_and_into_devices(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    write_result(link, b"x")
    assert file.read_bytes() == b"x"
    assert link.is_symlink()
    with pytest.raises(LeanError, match="No space left"):
        write_result(Path("/dev/full"), b"x")
    assert Path("/dev/full").is_char_device()
