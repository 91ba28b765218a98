"""``lean sweep``: what it prints and writes, and refusals in one line."""

import json
import sys

import pytest
import typer
import yaml
from sweep_runs import TEXT

from lean.cli.sweep import _read_grid
from lean.cli.sweep import sweep as command
from lean.errors import LeanError, UserError


@pytest.fixture
def lean(monkeypatch, capsys):
    """``lean(*arguments)`` -> (stdout, stderr)."""
    pytest.importorskip("matplotlib")
    app = typer.Typer(add_completion=False)
    app.command()(command)

    def call(*arguments):
        app([str(argument) for argument in arguments], standalone_mode=False)
        return capsys.readouterr()

    return call


SMALL = (
    "--formats",
    "int8",
    "--windows",
    "none",
    "--residuals",
    "0",
    "--max-tokens",
    "60",
    "--context-of-report",
    "64",
)


def test_the_command_prints_a_table_and_writes_the_files(lean, model, tmp_path, monkeypatch):
    (tmp_path / "text").write_text(TEXT.text)
    out = tmp_path / "out"
    printed = lean(model, *SMALL, "--text", tmp_path / "text", "--out", out)
    assert "| int8   | -        | -" in printed.out
    assert "Recommended: " in printed.out
    assert {file.name for file in out.iterdir()} == {
        "config.yaml", "results.jsonl", "frontier.csv", "frontier.png", "report.html"
    }  # fmt: skip
    monkeypatch.setattr("lean.eval.sweep.page.write_report", lambda judged, folder: [])
    report = json.loads(lean(model, *SMALL, "--text", tmp_path / "text", "--out", out, "--json").out)
    assert [cell["name"] for cell in report["cells"]] == ["exact", "int8"]
    assert report["config"] == yaml.safe_load((out / "config.yaml").read_text())


def test_without_matplotlib_nothing_runs(lean, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LeanError) as caught:
        lean("no-such-model", "--out", tmp_path / "out")
    assert "lean-inference[eval]" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--out DIR is missing"),
        (("--out", "o", "--kv-dtype", "int4"), "use --formats"),
        (("--out", "o", "--window", "64"), "use --windows"),
        (("--out", "o", "--windows", "many"), "'many' is not a whole number"),
        (("--out", "o", "--formats", "int8,,int4"), "commas between"),
        (("--out", "o", "--formats", "int9"), "int9"),
        (("--out", "o", "--text", "t", "--corpus", "python-docs"), "two texts"),
        (("--out", "o", "--bos", "twice"), "bos 'twice'"),
        (("--out", "o", "--limit", "3"), "of the --tasks"),
    ],
)
def test_impossible_options_are_refused_in_one_line(lean, arguments, message):
    with pytest.raises(UserError) as caught:
        lean("no-such-model", *arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pair_of_formats_is_one_item_in_either_order():
    def formats(text):
        return _read_grid(text, "none", "0", None, None, "first").formats

    assert formats("int8,k=int8,v=fp8,v=int4,k=int8,int4") == ("int8", "k=int8,v=fp8", "v=int4,k=int8", "int4")
    assert formats("k=fp8,v=int4") == ("k=fp8,v=int4",)
