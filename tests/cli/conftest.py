"""Fixtures that several tests of the command line share."""

import io
import json
import sys

import pytest
from rich.console import Console

from lean.cli.ending import run_to_end
from lean.cli.main import run_command


@pytest.fixture
def prompts(tmp_path):
    """``prompts(*lines)``: a file of them; objects become JSON."""

    def write(*lines):
        texts = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        (tmp_path / "prompts.jsonl").write_bytes(b"".join(text + b"\n" for text in texts))
        return tmp_path / "prompts.jsonl"

    return write


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="session")
def model(tiny):
    return str(tiny("llama", num_hidden_layers=1))


@pytest.fixture
def environment(monkeypatch):
    """No variable of the shell reaches the command, nor the other way round."""
    for name in ("TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("LEAN_MODEL", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def lean(environment, monkeypatch, capsys):
    """``lean(*arguments, stdin=bytes)`` -> (exit code, stdout, stderr)."""

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["lean", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return run_to_end(run_command), *capsys.readouterr()

    return call
