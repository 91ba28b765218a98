"""Each command with an output that takes nothing, in a process of its own. The handler is one: see test_streams.py."""

import json
import os
import resource
import subprocess
import sys
from itertools import cycle

import pytest
from streams import GONE, KINDS, lean

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("environment", "home")]

SHORT = ("--max-tokens", "5", "--ignore-eos", "--no-probe")
COMMANDS = {
    "run": ("run", "MODEL", "hi", *SHORT),
    "run --json": ("run", "MODEL", "hi", "--json", *SHORT),
    "models": ("models",),
    "info": ("info", "MODEL"),
    "doctor": ("doctor",),
    "eval ppl": ("eval", "ppl", "MODEL", "--max-tokens", "64"),
    "eval kld --json": ("eval", "kld", "MODEL", "--max-tokens", "64", "--json"),
    "eval needle": ("eval", "needle", "MODEL", "--lengths", "300", "--depths", "50", "--trials", "1", "--no-chat"),
    "bench decode": ("bench", "decode", "MODEL", "--context", "16"),
}


@pytest.mark.parametrize(("command", "kind"), list(zip(COMMANDS, cycle(KINDS))))
def test_a_command_whose_output_takes_nothing_ends_as_the_readme_says(model, command, kind):
    arguments = [model if word == "MODEL" else word for word in COMMANDS[command]]
    code, _, err = lean(*arguments, stdout=kind, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert code == (0 if kind in GONE else 1), err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert ("lean: cannot write to standard output: " in err) == (kind not in GONE)


@pytest.mark.parametrize("kind", list(KINDS)[:2])
def test_a_file_of_prompts_needs_no_output(model, prompts, out, kind):
    """Its answers go into a file. Neither stream can stop them."""
    file = prompts({"prompt": "hi"}, {"prompt": "there"})
    arguments = ("run", model, "--prompts", str(file), "--out", str(out), *SHORT)
    assert lean(*arguments, stdout=kind, stderr=kind)[0] == 0
    assert [json.loads(line)["finish_reason"] for line in out.read_text().splitlines()] == ["length", "length"]


def test_a_file_of_answers_on_a_full_disk_holds_whole_lines_only(model, prompts, out):
    file = prompts(*({"prompt": f"prompt {number}"} for number in range(9)))
    command = (sys.executable, "-P", "-m", "lean", "run", model, "--prompts", str(file), "--out", str(out), *SHORT)
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))  # noqa: E731
    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=small, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"lean: cannot write {out}: File too large"
    lines = out.read_text().splitlines(keepends=True)
    assert 0 < len(lines) < 9
    assert all(json.loads(line)["id"] is not None and line.endswith("\n") for line in lines)
