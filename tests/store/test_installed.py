"""What is on disk is listed with its real size, and only what is listed can be removed."""

import errno
import fcntl
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from helpers import refusal

from lean.cli.models import models_report, print_models
from lean.store import installed as store
from lean.store.installed import list_models, remove_model
from lean.store.pull import ARTEFACTS, MANIFEST

NAME = "smollm2-135m"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def models(home):
    (home / "models").mkdir(parents=True)
    return home / "models"


def write_model(folder, config=CONFIG, weights=1000, sha256=None):
    """A folder as a pull leaves it; returns its bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"w" * weights)
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    manifest = {"source": "x", "sha256": sha256 or ARTEFACTS[NAME].member_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return sum(file.stat().st_size for file in folder.iterdir())


def write_repo(hub, repo_id, revisions, main=None):
    """A repository in the hub's cache by hand: ``revisions`` is {commit: {file: content}}; returns its folder."""
    repo = hub / ("models--" + repo_id.replace("/", "--"))
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    for commit, files in revisions.items():
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for name, content in files.items():
            blob = repo / "blobs" / f"{hash(content) & (2**64 - 1):016x}"
            blob.write_bytes(content)
            (snapshot / name).symlink_to(Path("../../blobs", blob.name))
    (repo / "refs" / "main").write_text(main or list(revisions)[-1])
    return repo


COMMIT, OTHER = "1" * 40, "2" * 40
CHECKPOINT = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"w" * 5000}


@pytest.fixture
def hub(tmp_path):
    return tmp_path / "hub"


def tree(*folders):
    """Every path below, and what files hold."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.name.endswith(".lock"):
                continue
            found[path] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


def listed():
    return {model.name: model for model in list_models()}


# --- listing ---


def test_nothing_is_there_at_first_and_how_to_get_something_is_said(capsys):
    assert list_models() == []
    assert models_report([]) == []
    print_models([])
    assert capsys.readouterr().out == f"no models yet: lean pull {NAME}\n"


def test_a_pulled_model_is_described_by_its_config_and_its_real_bytes(models):
    nbytes = write_model(models / NAME)
    (model,) = list_models()
    assert models_report([model]) == [
        {
            "name": NAME,
            "origin": "pulled",
            "folder": str(models / NAME),
            "bytes": nbytes,
            "architecture": "LlamaForCausalLM",
            "model_type": "llama",
            "dtype": "bfloat16",
            "complete": True,
        }
    ]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", (None, None, None)),
        ("[]", (None, None, None)),
        ("[" * 100_000, (None, None, None)),
        ('{"architectures": [], "model_type": 3, "dtype": {}}', (None, None, None)),
        ('{"architectures": "x", "torch_dtype": "float16"}', (None, None, "float16")),
        ('{"model_type": "gemma3", "text_config": {"dtype": "float32"}}', (None, "gemma3", "float32")),
    ],
)
def test_what_config_json_does_not_say_is_unknown(models, config, said):
    write_model(models / NAME, config)
    (model,) = list_models()
    assert (model.architecture, model.model_type, model.dtype) == said
    assert model.complete


def test_a_model_that_does_not_fit_its_manifest_is_incomplete(models):
    for name in ("damaged", "unsigned", "older"):
        write_model(models / name, sha256="of another release")
    write_model(models / NAME, sha256="of another release")
    (models / "damaged" / "model.safetensors").write_bytes(b"w")
    (models / "unsigned" / MANIFEST).unlink()
    (models / "empty").mkdir()
    complete = {model.name: model.complete for model in list_models()}
    assert complete == {NAME: False, "damaged": False, "unsigned": False, "empty": False, "older": True}


def test_work_folders_of_killed_pulls_are_listed_and_nothing_else_that_is_hidden(models):
    write_model(models / NAME)
    (models / f".{NAME}.lock").touch()
    (models / ".other").mkdir()
    (models / "file").touch()
    (models / f".{NAME}.abc_12.tmp" / "checkpoint").mkdir(parents=True)
    (models / f".{NAME}.abc_12.tmp" / "model.gguf").write_bytes(b"g" * 77)
    found = listed()
    assert list(found) == [f".{NAME}.abc_12.tmp", NAME]
    left = found[f".{NAME}.abc_12.tmp"]
    assert (left.nbytes, left.complete) == (77, False)


def test_hub_checkpoints_are_listed_and_shared_blobs_count_once(hub, models):
    write_model(models / NAME)
    newer = CHECKPOINT | {"config.json": json.dumps(CONFIG | {"dtype": "float16"}).encode()}
    repo = write_repo(hub, "owner/name-1.5", {OTHER: newer, COMMIT: CHECKPOINT}, main=OTHER)
    (repo / "blobs" / "abc.incomplete").write_bytes(b"p" * 50)
    write_repo(hub, "owner/only.config", {COMMIT: {"config.json": b"{}"}})
    write_repo(hub, "owner/only-weights", {COMMIT: {"model.safetensors": b"w"}})
    write_repo(hub, "owner/pickled", {COMMIT: {"config.json": b"{}", "pytorch_model.bin": b"w"}})
    shutil.copytree(repo, hub / "datasets--owner--set", symlinks=True)
    for strange in ("models--..--..", "models----etc", "models--gpt2", "models--a--b--c", "models--a--..b"):
        shutil.copytree(repo, hub / strange, symlinks=True)
    (hub / ".locks").mkdir()
    (hub / "version.txt").touch()
    _, model = list_models()
    assert (model.name, model.origin, model.complete) == ("owner/name-1.5", "hub", True)
    assert model.folder == repo.resolve() / "snapshots" / OTHER
    assert (model.architecture, model.model_type, model.dtype) == ("LlamaForCausalLM", "llama", "float16")
    assert model.nbytes == 5000 + sum(len(files["config.json"]) for files in (newer, CHECKPOINT)) + 50 + len(OTHER)


@pytest.mark.parametrize(
    ("index", "complete"),
    [
        ({"a": "model-1.safetensors", "b": "model-2.safetensors"}, False),
        ({"a": "model-1.safetensors"}, True),
        ([], False),
        (None, False),
    ],
)
def test_a_hub_checkpoint_without_all_its_shards_is_incomplete(hub, index, complete):
    files = {"config.json": b"{}", "model-1.safetensors": b"w"}
    if index is not None:
        files["model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    write_repo(hub, "owner/name", {COMMIT: files})
    (model,) = list_models()
    assert model.complete is complete


def test_a_damaged_cache_hides_nothing_else(hub, models, home, caplog):
    write_model(models / NAME)
    write_repo(hub, "owner/good", {COMMIT: CHECKPOINT})
    broken = write_repo(hub, "owner/broken", {COMMIT: CHECKPOINT})
    shutil.rmtree(broken / "blobs")
    assert list(listed()) == [NAME, "owner/good"]
    shutil.rmtree(hub)
    hub.touch()
    assert list(listed()) == [NAME]
    assert "hub's cache" in caplog.text
    hub.unlink()
    shutil.rmtree(models)
    models.touch()
    assert list_models() == []
    assert str(models) in caplog.text


def test_the_table_names_every_model_and_gives_the_terminal_no_orders(hub, models, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    write_model(models / NAME)
    write_model(models / "[red]\x1b[31m\n", {"architectures": ["\x1b]0;x\x07"]})
    (models / "linked").symlink_to("/elsewhere")
    write_repo(hub, "owner/" + "n" * 90, {COMMIT: {**CHECKPOINT, "model.safetensors": b"w" * 3 * 2**19}})
    print_models(list_models())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "architecture", "dtype", "size", "origin", "folder"]
    assert len(lines) == 5
    strange, linked, pulled, hubs = (" ".join(line.split()) for line in lines[1:])
    assert strange.startswith("[red]\\x1b[31m\\n \\x1b]0;x\\x07 ? 0.0 MiB pulled ")
    assert linked == f"linked ? ? 0.0 MiB pulled, incomplete {models / 'linked'} -> /elsewhere"
    assert pulled == f"{NAME} LlamaForCausalLM bfloat16 0.0 MiB pulled {models / NAME}"
    assert hubs.startswith("owner/" + "n" * 90 + " LlamaForCausalLM bfloat16 1.5 MiB hub /")
    assert "\x1b" not in "".join(lines)


# --- removing ---


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
        assert message.endswith(f"is on disk; there is: {NAME}, owner/name")
        assert len(message) < 500
    assert tree(tmp_path) == before


def test_with_nothing_on_disk_that_is_said(home):
    assert refusal(remove_model, NAME) == f"no model '{NAME}' is on disk; there is none"
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
    assert "not all of it could be deleted" in refusal(remove_model, "owner/name")
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
