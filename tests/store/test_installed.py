"""What is on disk is listed with its real size."""

import json
import shutil

import pytest
from stored import CHECKPOINT, COMMIT, CONFIG, NAME, OTHER, listed, write_model, write_repo

from lean.cli.models import models_report, print_models
from lean.store.installed import list_models
from lean.store.pull import MANIFEST

pytestmark = pytest.mark.usefixtures("home")


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
