"""Only what is listed can be removed, all of it or nothing, and nothing beside it."""

import errno
import fcntl
import os
import shutil
import threading
import time

import pytest
from helpers import refusal
from stored import CHECKPOINT, COMMIT, NAME, OTHER, listed, write_model, write_repo

from lean.store import installed as store
from lean.store.installed import list_models, remove_model
from lean.store.pull import MANIFEST

pytestmark = pytest.mark.usefixtures("home")


def tree(*folders):
    """Every path below, and what files hold."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.name.endswith(".lock"):
                continue
            found[path] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


@pytest.mark.parametrize("damage", [None, MANIFEST, "config.json", "model.safetensors"])
def test_a_pulled_model_is_removed_complete_or_not(models, damage):
    nbytes = write_model(models / NAME)
    write_model(models / "other")
    if damage:
        nbytes -= (models / NAME / damage).stat().st_size
        (models / NAME / damage).unlink()
    assert remove_model(NAME) == nbytes
    assert list(listed()) == ["other"]
    assert {entry.name for entry in models.iterdir()} == {"other", f".{NAME}.lock"}


def test_a_leftover_is_removed_by_its_name_and_the_model_stays(models):
    write_model(models / NAME)
    (models / f".{NAME}.abc.tmp").mkdir()
    (models / f".{NAME}.abc.tmp" / "model.gguf").write_bytes(b"g" * 77)
    assert remove_model(f".{NAME}.abc.tmp") == 77
    assert {name: model.complete for name, model in listed().items()} == {NAME: True}


ESCAPES = [
    "",
    ".",
    "..",
    "../models",
    "../../etc",
    "/",
    "/etc",
    "~",
    "a\0b",
    "x\ny",
    "x" * 10_000,
    "\udcff",
    "*",
    f"./{NAME}",
]
ESCAPES += [
    f"{NAME}/",
    f"{NAME}/config.json",
    f"../models/{NAME}",
    f".{NAME}.lock",
    NAME.upper(),
    "models--owner--name",
]
ESCAPES += ["owner", "owner/name/", "owner/../owner/name", "../..", "/etc", ".locks", "owner--name", "HOME"]


@pytest.mark.parametrize("name", ESCAPES, ids=repr)
def test_a_name_that_is_not_listed_removes_nothing(models, hub, home, monkeypatch, tmp_path, name):
    write_model(models / NAME)
    (models / f".{NAME}.lock").touch()
    repo = write_repo(hub, "owner/name", {COMMIT: CHECKPOINT})
    shutil.copytree(repo, hub / "models--..--..", symlinks=True)
    shutil.copytree(repo, hub / "models----etc", symlinks=True)
    monkeypatch.chdir(models)
    before = tree(tmp_path)
    for wrong in (name, str(models / NAME)) if name != "HOME" else (str(home),):
        message = refusal(remove_model, wrong)
        assert message.endswith(f"is on disk; models on disk: {NAME}, owner/name")
        assert len(message) < 500
    assert tree(tmp_path) == before


def test_with_nothing_on_disk_that_is_said(home):
    assert refusal(remove_model, NAME) == f"no model '{NAME}' is on disk; models on disk: none"
    assert not home.exists()


def test_links_are_removed_and_not_followed(models, hub, tmp_path):
    precious = tmp_path / "precious"
    write_model(precious / "model")
    write_repo(precious, "owner/linked", {COMMIT: CHECKPOINT})
    (models / NAME).symlink_to(precious / "model")
    (models / "dangling").symlink_to(precious / "nothing")
    (models / "file").symlink_to(precious / "model" / "config.json")
    (models / "loop").symlink_to("loop")
    (models / ".x.y.tmp").symlink_to(precious)
    write_model(models / "inside")
    (models / "inside" / "folder").symlink_to(precious)
    (models / "inside" / "weights").symlink_to(precious / "model" / "model.safetensors")
    hub.mkdir()
    (hub / "models--owner--linked").symlink_to(precious / "models--owner--linked")
    repo = write_repo(hub, "owner/inside", {COMMIT: CHECKPOINT})
    (repo / "snapshots" / COMMIT / "extra.json").symlink_to(precious / "model" / "config.json")
    (repo / "blobs" / "folder").symlink_to(precious)
    before = tree(precious)
    found = listed()
    assert {name for name, model in found.items() if model.complete} == {NAME, "inside", "owner/linked", "owner/inside"}
    inside = sum(
        file.stat().st_size for file in (models / "inside").iterdir() if not file.is_symlink() and file.is_file()
    )
    sizes = {name: model.nbytes for name, model in found.items()}
    assert sizes.pop("inside") == inside
    assert sizes.pop("owner/inside") == sum(map(len, CHECKPOINT.values())) + len(COMMIT)  # in refs/main
    assert set(sizes.values()) == {0}
    for name, model in found.items():
        assert remove_model(name) == model.nbytes
        assert tree(precious) == before
    assert list_models() == []


def test_a_lock_that_is_a_link_is_not_opened(models, tmp_path):
    write_model(models / NAME)
    (tmp_path / "precious").write_text("x")
    (models / f".{NAME}.lock").symlink_to(tmp_path / "precious")
    assert "link" in refusal(remove_model, NAME)
    assert (tmp_path / "precious").read_text() == "x"
    assert listed()[NAME].complete


@pytest.mark.parametrize("entry", [NAME, f".{NAME}.abc.tmp"])
def test_a_running_pull_ends_before_its_model_is_removed(models, entry, capfd):
    write_model(models / NAME)
    work = models / f".{NAME}.abc.tmp"
    work.mkdir()
    removed = []
    with (models / f".{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: removed.append(remove_model(entry)))
        thread.start()
        while "waiting for another pull" not in capfd.readouterr().err:
            assert thread.is_alive()
            time.sleep(0.01)
        assert work.exists()
        assert (models / NAME / MANIFEST).exists()
        work.rmdir()  # what a pull does at its end
    thread.join(10)
    assert removed == [0] if entry != NAME else removed[0] > 1000
    assert (models / NAME).exists() == (entry != NAME)


@pytest.mark.parametrize("step", ["replace", "rmtree"])
def test_a_removal_that_is_killed_leaves_no_half_model(models, monkeypatch, step):
    write_model(models / NAME)
    if step == "replace":
        monkeypatch.setattr(store.os, "replace", lambda *args: os._exit(1))
    else:

        def half(folder):
            (folder / "model.safetensors").unlink()
            os._exit(1)

        monkeypatch.setattr(store.shutil, "rmtree", half)
    child = os.fork()
    if child == 0:
        try:
            remove_model(NAME)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    monkeypatch.undo()
    monkeypatch.setenv("LEAN_HOME", str(models.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(models.parent / "hub"))
    found = {name: model.complete for name, model in listed().items()}
    assert {name for name, complete in found.items() if complete} == ({NAME} if step == "replace" else set())
    for name in found:
        remove_model(name)
    assert list_models() == []


def test_a_removal_that_cannot_rename_leaves_everything(models, monkeypatch):
    write_model(models / NAME)
    before = tree(models)

    def read_only(*args):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(models))

    monkeypatch.setattr(store.os, "replace", read_only)
    assert refusal(remove_model, NAME) == f"cannot remove {NAME}: Read-only file system ({models})"
    assert tree(models) == before


def test_a_read_only_folder_is_one_line_and_nothing_is_touched(models, hub, monkeypatch, tmp_path):
    write_model(models / NAME)
    repo = write_repo(hub, "owner/name", {COMMIT: CHECKPOINT})
    before = tree(tmp_path)
    closed = {str(models / NAME), str(repo / "blobs")}
    access = os.access
    monkeypatch.setattr(store.os, "access", lambda place, mode: place not in closed and access(place, mode))
    assert f"Permission denied ({models / NAME})" in refusal(remove_model, NAME)
    assert f"Permission denied ({repo / 'blobs'})" in refusal(remove_model, "owner/name")
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_really_is_read_only_is_one_line(models):
    write_model(models / NAME)
    models.chmod(0o555)
    try:
        assert "Permission denied" in refusal(remove_model, NAME)
        assert listed()[NAME].complete
    finally:
        models.chmod(0o755)


def test_a_hub_model_is_removed_with_all_its_revisions_and_only_it(hub, models):
    write_model(models / NAME)
    newer = CHECKPOINT | {"config.json": b"{}"}
    repo = write_repo(hub, "owner/name", {OTHER: newer, COMMIT: CHECKPOINT})
    (repo / "blobs" / "abc.incomplete").write_bytes(b"p" * 50)
    for copy in ("models--other--name", "datasets--owner--name"):  # the same revisions under other names
        shutil.copytree(repo, hub / copy, symlinks=True)
    nbytes = listed()["owner/name"].nbytes
    rest = tree(hub / "models--other--name", hub / "datasets--owner--name", models)
    assert remove_model("owner/name") == nbytes == 5000 + len(CHECKPOINT["config.json"]) + 2 + 50 + len(COMMIT)
    assert not repo.exists()
    assert tree(hub / "models--other--name", hub / "datasets--owner--name", models) == rest
    assert list(listed()) == [NAME, "other/name"]


def test_a_hub_model_that_will_not_go_is_one_line(hub, monkeypatch, capfd, caplog):
    write_repo(hub, "owner/name", {COMMIT: CHECKPOINT})

    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", denied)
    assert "some of its files could not be deleted" in refusal(remove_model, "owner/name")
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


def test_what_another_removal_took_first_frees_nothing(models, hub):
    write_model(models / NAME)
    repo = write_repo(hub, "owner/name", {COMMIT: CHECKPOINT})
    pulled, hubs = list_models()
    shutil.rmtree(models / NAME)
    shutil.rmtree(repo)
    assert store._remove_pulled(pulled) == 0
    assert store._remove_hub(hubs) == 0
