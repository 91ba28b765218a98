"""The transcript in the README is what the command prints."""

import re
from pathlib import Path

import pytest

from lean import LLM, EngineConfig
from lean.report import closing_line, start_up_line
from lean.store.pull import pull
from lean.store.source import resolve

README = Path(__file__).parents[2] / "README.md"


def transcript() -> str:
    """The block between the two comments, with single spaces."""
    block = README.read_text(encoding="utf-8").split("<!-- transcript")[1].split("<!-- end of the transcript")[0]
    return " ".join(block.split())


def test_the_closing_line_has_the_words_of_the_command():
    line = transcript()
    tokens = re.search(r"(\d+) prompt tokens, (\d+) new tokens", line)
    speed = re.search(r"first token after ([\d.]+) s, then ([\d.]+) tokens/s", line)
    memory = re.search(r"held ([\d.]+) MiB for (\d+) tokens \(in bf16, without blocks: ([\d.]+) MiB\)", line)
    assert tokens
    assert speed
    assert memory
    report = {
        "prompt_tokens": int(tokens[1]),
        "cached_tokens": 0,
        "completion_tokens": int(tokens[2]),
        "finish_reason": "stop",
        "timing": {"ttft_s": float(speed[1]), "decode_tok_s": float(speed[2])},
        "kv": {
            "bytes_held": float(memory[1]) * 2**20,
            "tokens_held": int(memory[2]),
            "bytes_if_bf16": float(memory[3]) * 2**20,
        },
    }
    assert closing_line(report) in line


@pytest.mark.slow
def test_the_start_up_line_is_that_of_the_command():
    """But for the kernels, which depend on the CPU."""
    pull("smollm2-135m")
    llm = LLM(resolve("smollm2-135m"), EngineConfig(max_num_seqs=1, prefix_tail_memory=0))
    assert start_up_line(llm).split("; kernels:")[0] in transcript()
