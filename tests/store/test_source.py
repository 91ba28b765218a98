"""A model name is resolved to its source or refused. A pull is complete and verified, or leaves nothing."""

import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import refusal

from lean.store import source as hub
from lean.store.source import ModelSource, resolve

NAME = "smollm2-135m"
WEIGHTS = b"weights" * 1000


pytestmark = pytest.mark.usefixtures("home")


# Paths and names


def test_an_existing_path_goes_before_every_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (NAME, "owner/name", "two words"):
        Path(name).mkdir(parents=True)
        assert resolve(name) == ModelSource(Path(name), None, Path(name).name, "path")
    assert resolve("~/owner/name").folder == tmp_path / "owner" / "name"
    assert resolve(".").name == tmp_path.name


def test_a_gguf_file_is_accepted_by_its_content_and_other_files_are_not(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF\3\0\0\0" + bytes(24))
    assert resolve(str(file)) == ModelSource(tmp_path, "tiny.gguf", "tiny", "path")
    file.write_bytes(b"GGML" + bytes(20))
    assert "not a GGUF file" in refusal(resolve, str(file))
    file.write_bytes(b"GGUF\3\0\0\0" + bytes(24))
    for name, shown in [("tiny.GGUF", "tiny"), ("Tiny-1.5B", "Tiny-1.5B")]:
        file = file.rename(tmp_path / name)
        assert resolve(str(file)) == ModelSource(tmp_path, name, shown, "path")
    file = file.rename(tmp_path / "pytorch_model.bin")
    file.write_bytes(b"PK\3\4" + bytes(20))
    assert "config.json and *.safetensors, or a .gguf file" in refusal(resolve, str(file))


@pytest.mark.parametrize("model", ["./x", "../x y?", "/no/such", "~/no/such", "no.gguf", "a/b.gguf"])
def test_a_path_that_does_not_exist_is_called_a_path(model):
    assert "no such file or folder" in refusal(resolve, model)


@pytest.mark.parametrize("model", ["Why is the sky blue?", "why?", "tell me\nmore", "word " * 2000, "a\0 b"])
def test_a_prompt_in_place_of_the_model_shows_the_right_call(model):
    message = refusal(resolve, model)
    assert 'lean run smollm2-135m "your prompt"' in message
    assert len(message) < 300


@pytest.mark.parametrize("model", ["", "smollm", "a/../b", "a..b/c", "a/b/c", "x" * 10_000, "a\0b"])
def test_an_unknown_name_lists_what_is_accepted(model):
    assert f"hub id owner/name, or one of: {NAME}" in refusal(resolve, model)


# The files of the weights


def test_the_weights_are_all_safetensors_of_a_folder_or_the_one_gguf_file(tmp_path):
    for name in ("model-2.safetensors", "model-1.safetensors", "config.json", "a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(name.encode())
        os.utime(tmp_path / name, ns=(0, 10**18 + len(name)))
    folder, file = (ModelSource(tmp_path, gguf, "x", "path") for gguf in (None, "b.gguf"))
    shards = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    assert folder.weight_files() == [(shard, 19, 10**18 + 19) for shard in shards]
    assert file.weight_files() == [(tmp_path / "b.gguf", 6, 10**18 + 6)]


def test_the_weights_of_a_split_gguf_model_are_all_its_parts(tmp_path):
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"x")
    source = ModelSource(tmp_path, parts[0].name, "m", "path")
    assert [path for path, _, _ in source.weight_files()] == parts


def test_a_link_to_a_weight_file_has_the_size_and_the_time_of_the_file(tmp_path):
    blob, folder = tmp_path / "blob", tmp_path / "snapshot"
    folder.mkdir()
    blob.write_bytes(b"weights")
    os.utime(blob, ns=(0, 10**18))
    (folder / "model.safetensors").symlink_to(blob)
    source = ModelSource(folder, None, "x", "hub")
    assert source.weight_files() == [(folder / "model.safetensors", 7, 10**18)]


# The hub


@pytest.fixture
def online(monkeypatch, tmp_path):
    """A hub with one repository whose files are `online.files`; `online.downloads` records what is asked for."""
    state = SimpleNamespace(files=["config.json", "model.safetensors"], downloads=[], error=None, size=2_500_000)

    def model_info(self, repo_id, timeout, files_metadata):
        assert timeout < 10
        files = [SimpleNamespace(rfilename=name, size=state.size if files_metadata else None) for name in state.files]
        return SimpleNamespace(siblings=files, sha="0" * 40, tags=["pytorch", "license:mit"])

    def snapshot_download(repo_id, **options):
        state.downloads.append(options)
        if state.error:
            raise state.error
        print("a progress bar", file=sys.stderr)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return state


def test_a_hub_id_downloads_code_only_if_it_is_trusted(online, tmp_path, capsys):
    assert resolve("owner/name", progress=False) == ModelSource(tmp_path, None, "owner/name", "hub")
    assert capsys.readouterr().err == ""
    resolve("owner/name", trust_remote_code=True)
    plain, trusted = (set(options["allow_patterns"]) for options in online.downloads)
    assert trusted - plain == {"*.py"}
    assert not any(pattern.endswith((".bin", ".pt")) for pattern in plain)


def test_what_is_downloaded_is_said_before_with_size_and_licence(online, tmp_path, capsys):
    online.files += ["README.md", "original/model.safetensors", "consolidated.safetensors", "model.py"]
    resolve("owner/name")
    said, bar = capsys.readouterr().err.splitlines()
    assert said.startswith("owner/name: downloading 5.0 MB in 2 files from the Hugging Face hub; licence mit; ")
    assert bar == "a progress bar"
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    resolve("owner/name")
    assert "downloading 2.5 MB in 1 file from" in capsys.readouterr().err  # the other one is there
    (snapshot / "model.safetensors").touch()
    resolve("owner/name")
    assert capsys.readouterr().err == "a progress bar\n"
    online.size = None
    resolve("another/name")
    assert "an unknown number of bytes" in capsys.readouterr().err


def test_a_user_without_a_home_folder_is_told_where_the_hub_needs_one(online, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    assert "set HF_HOME" in refusal(resolve, "owner/name")
    assert online.downloads == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], "unpickling runs code"),
        (["pytorch_model.bin", "onnx/model.safetensors"], "unpickling runs code"),
        (["m.Q4.gguf", "README.md"], "GGUF"),
    ],
)
def test_a_repository_without_safetensors_is_refused_before_any_download(online, files, message):
    online.files = files
    assert message in refusal(resolve, "owner/name")
    assert online.downloads == []


def test_refusals_of_the_hub_say_what_to_do(online, monkeypatch):
    from huggingface_hub import errors

    def error(kind):
        return kind("401\nClient error", response=SimpleNamespace(headers={}, request=None, status_code=401))

    online.error = error(errors.GatedRepoError)
    assert "accept its terms" in refusal(resolve, "owner/name")
    online.error = RuntimeError("reset\nby peer")
    assert f"(reset by peer): {hub.WHAT_TO_DO}" in refusal(resolve, "owner/name")

    def missing(*_, **__):
        raise error(errors.RepositoryNotFoundError)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", missing)
    assert f"no model owner/name on the hub, or it needs `hf auth login`: {hub.WHAT_TO_DO}" in refusal(
        resolve, "owner/name"
    )


def test_offline_says_so_at_once_unless_the_cache_has_the_model(tmp_path):
    begin = time.monotonic()
    message = refusal(resolve, "owner/name")
    assert "cannot be reached" in message
    assert hub.WHAT_TO_DO in message
    assert time.monotonic() - begin < 3
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    assert resolve("owner/name").folder == snapshot


def test_a_silent_hub_is_given_up(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        begin = time.monotonic()
        assert "cannot be reached" in refusal(resolve, "owner/name")
    assert time.monotonic() - begin < 3
