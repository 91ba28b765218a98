"""The lean command: help, the default model, and the commands for models."""

import json
import subprocess
import sys

import pytest
import typer
from commands import assert_refused

from lean.cli.main import app
from lean.quant import NAMES

RUN = ("--max-tokens", "6", "--ignore-eos")


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("command", [(), ("run",), ("pull",), ("info",), ("models",), ("rm",)], ids=str)
def test_every_command_explains_itself(lean, command):
    code, out, err = lean(*command, "--help")
    assert (code, err) == (0, "")
    assert "Usage:" in out
    words = {
        ("run",): ("--kv-dtype", "int8", "[default: 32]", "smollm2-135m", "--temperature"),
        (): ("run", "pull", "info", "models", "rm"),
    }
    assert all(word in out for word in words.get(command, ("--help",)))


def commands(command, path=()):
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def test_every_command_argument_and_option_has_a_help_line():
    found = dict(commands(typer.main.get_command(app)))
    assert {("run",), ("eval", "kld"), ("bench", "decode")} <= found.keys()
    for path, command in found.items():
        assert command.help, path
        assert not [item.name for item in command.params if not item.help], path


def test_help_waits_for_neither_torch_nor_transformers():
    code = "import lean.cli.main, sys; sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_command_the_help_is_shown(lean):
    assert lean()[:2] == lean("--help")[:2]


def test_lean_model_is_used_and_said(lean, model, monkeypatch):
    monkeypatch.setenv("LEAN_MODEL", model)
    code, out, err = lean("run", "-p", "hello", *RUN)
    assert code == 0
    assert f"model: {model} (LEAN_MODEL)" in err.splitlines()
    assert out == lean("run", model, "hello", *RUN)[1]
    assert model in lean("info")[2]


@pytest.mark.parametrize("name", ["[red]model", "a[", "a[/b]"])
def test_a_path_with_brackets_is_shown_as_it_is(lean, model, tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(model)
    monkeypatch.setenv("LEAN_MODEL", str(folder))
    code, _, err = lean("run", "-p", "hi", *RUN)
    assert code == 0
    assert f"model: {folder} (LEAN_MODEL)" in err.splitlines()


def test_info_describes_a_model_and_what_its_cache_costs(lean, model):
    code, out, err = lean("info", model, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    report = json.loads(out, parse_constant=no_constant)
    assert (report["model_type"], report["dtype"], report["layers"], report["head_dim"]) == ("llama", "float32", 1, 16)
    assert (report["num_q_heads"], report["num_kv_heads"], report["max_position_embeddings"]) == (4, 2, 512)
    costs = {"fp32": 256, "bf16": 128, "int8": 72, "fp8": 72, "k8v4": 54, "int4": 36, "int3": 28, "k6v4": 44}
    costs |= {"pc4v3": 32}
    assert report["bytes_per_token"].keys() == set(NAMES)
    assert report["bytes_per_token"] | costs == report["bytes_per_token"]
    code, out, err = lean("info", model)
    assert (code, err) == (0, "")
    assert all(word in out for word in ("llama", "float32", *NAMES, "72"))


def test_models_are_listed_and_removed(lean, home):
    assert lean("models")[0] == 0
    code, out, err = lean("models", "--json")
    assert (code, err, json.loads(out)) == (0, "", {"models": []})
    assert_refused(lean("rm", "../x"), "../x")
    broken = home / "models" / "smollm2-135m"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{}")
    assert json.loads(lean("models", "--json")[1])["models"][0]["name"] == "smollm2-135m"
    code, out, err = lean("rm", "smollm2-135m")
    assert (code, out) == (0, "")
    assert "removed" in err
    assert not broken.exists()
