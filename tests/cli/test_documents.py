"""The commands that the documents show are commands of this version."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from lean.cli.main import app

DOCS = Path(__file__).parents[2] / "docs"
BEGINNING = re.compile(r"    (?:[A-Z_]+=\S+ )?(?:systemd-run .* )?(?:lean|python -m lean\S*) ")
NUMBERS = {"N": "64", "R": "64"}  # what a reader puts there
REMARK = re.compile(r"\s{2,}\S.*")  # behind a command, in words or in brackets


def commands(page: str) -> list[list[str]]:
    """The words of every indented command, from `lean` or `python` on; lines that go on are joined."""
    found: list[str] = []
    for line in page.splitlines():
        if BEGINNING.match(line):
            found.append(line.strip())
        elif line.startswith("     ") and found and (found[-1].endswith("\\") or found[-1].count("'") % 2):
            found[-1] = f"{found[-1].removesuffix(chr(92))} {line.strip()}"
    words = [[NUMBERS.get(word, word) for word in shlex.split(REMARK.sub("", line))] for line in found]
    return [line[next(i for i, word in enumerate(line) if word in ("lean", "python")) :] for line in words]


PAGES = {page.name: commands(page.read_text(encoding="utf-8")) for page in sorted(DOCS.glob("*.md"))}
ALL = [(page, words) for page, found in PAGES.items() for words in found]


def parse(words: list[str]) -> None:
    """Raises the parser's error for what is no command, option or value of `lean`."""
    command = typer.main.get_command(app)
    context = command.make_context("lean", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def test_the_pages_have_commands():
    assert len(PAGES["speed.md"]) > 20
    assert len(PAGES["accuracy.md"]) > 5


@pytest.mark.parametrize(("page", "words"), ALL, ids=lambda part: part if isinstance(part, str) else " ".join(part))
def test_every_command_is_one(page, words):
    if words[0] == "lean":
        parse(words[1:])
        return
    assert importlib.util.find_spec(words[2]) is not None
    for word in words[3:]:
        if word.startswith("{"):
            assert json.loads(word)["model_type"]


@pytest.mark.parametrize("wrong", ["bench decoder", "bench decode --againts llama.cpp", "bench serve --rounds two"])
def test_another_command_is_refused(wrong):
    with pytest.raises(Exception, match=r"(?i)no such|valid integer"):
        parse(wrong.split())
