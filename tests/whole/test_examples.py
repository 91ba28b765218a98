"""The scripts of examples/ run as they are, on a tiny model, and use nothing but lean's public names."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

import lean

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
FOLDER = EXAMPLES[0].parent


@pytest.fixture
def run(tiny, monkeypatch, capsys):
    """``run(name, *arguments)``: what an example prints, given a tiny model."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, str(tiny("llama")), *arguments])
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_stream_prints_the_whole_answer(run):
    first, *_, last = run("stream", "--max-tokens", "7").splitlines()
    assert first == "KV cache: 162 bytes per token, 2.37x smaller than bf16"  # of a tiny model: scales weigh more
    assert last == "45 prompt + 7 new tokens (length)"


def test_batch_prints_every_token_of_every_prompt_with_its_log_probability(run):
    lines = run("batch", "--max-tokens", "3", "--logprobs", "2").splitlines()
    assert [line.split(" -> ")[0] for line in lines[::4]] == [
        "'The capital of France is'",
        "'Water boils at'",
        "'One, two, three,'",
    ]
    tokens = [line for line in lines if line.startswith("    ")]
    assert len(tokens) == 9
    for line in tokens:
        logprob, alternatives = re.search(r"logprob +(-\d+\.\d{3})   most likely: (.*)", line).groups()
        probabilities = [float(p) for p in re.findall(r" (\d\.\d{3})(?:,|$)", alternatives)]
        assert len(probabilities) == 2
        assert float(logprob) < 0
        assert probabilities == sorted(probabilities, reverse=True)


def test_accuracy_compares_every_format_with_the_exact_cache(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely, " * 10)
    printed = run("accuracy", "--text", str(text), "--tokens", "300", "--kv-dtype", "fp32", "int8", "int4")
    pattern = r"(\w+) +(\d\.\d\d)x .* 300 tokens scored\n.*exact cache: (\S+)\)\n.*mean KLD (\S+) ± \S+ nats"
    rows = re.findall(pattern, printed)
    assert [(name, smaller) for name, smaller, *_ in rows] == [("fp32", "0.50"), ("int8", "1.78"), ("int4", "3.56")]
    assert len({exact for *_, exact, _ in rows}) == 1
    same, int8, int4 = (float(kld) for *_, kld in rows)
    assert abs(same) < 1e-6
    assert abs(int8) < int4


def test_endless_holds_the_same_bytes_however_many_tokens_there_are(run):
    *lines, last = run("endless", "--tokens", "650", "--window", "96").splitlines()
    counts = [re.search(r"([\d,]+) tokens generated: the cache holds ([\d,]+) bytes", line).groups() for line in lines]
    assert [tokens for tokens, _ in counts] == ["128", "256", "384", "512", "640"]
    assert len({held for _, held in counts}) == 1
    assert int(counts[0][1].replace(",", "")) > 0
    assert "650 tokens generated" in last


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_uses_public_names_only(example):
    source = example.read_text(encoding="utf-8")
    assert source.count("\n") < 60
    nodes = list(ast.walk(ast.parse(source)))
    taken = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "lean"]
    for node in taken:
        assert node.module == "lean" or node.module.startswith("lean.eval.")
        if node.module == "lean":
            assert {alias.name for alias in node.names} <= set(lean.__all__)
    private = [node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
    assert not private


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES} == {"accuracy", "batch", "endless", "stream"}
