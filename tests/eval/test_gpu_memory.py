"""The memory arithmetic of docs/gpu-memory.md is that of the code that a start runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import refusal

from lean import EngineConfig
from lean.eval import gpu_memory
from lean.eval.gpu_memory import (
    CASES,
    CONFIGS,
    DRIVER,
    GIB,
    HEADER,
    LLAMA_3B,
    LLAMA_8B,
    Held,
    Share,
    as_line,
    rows,
    share_card,
)
from lean.options import Options

DOC = (Path(__file__).parents[2] / "docs/gpu-memory.md").read_text(encoding="utf-8")


def test_held_counts_tensors_while_they_live_and_no_view_of_another():
    given = torch.ones(1000)
    with Held(False) as held:
        a = torch.ones(100)
        b = a.view(10, 10)
        c = a + 1
        del a, b
        d = given[:10] * 2
        assert held.now == 440  # a is gone with its last view
        del c, d
    assert (held.most, held.now) == (800, 0)


@pytest.fixture(scope="module")
def small() -> Share:
    config = EngineConfig(prefill_chunk=256, max_num_batched_tokens=512)
    return share_card(8 * GIB, LLAMA_3B, config)


def test_what_a_step_of_a_llama_takes_is_near_its_largest_tensors(small):
    """512 tokens through the MLP: gate, up, and what the activation makes of them; then logits of 32 rows."""
    mlp = 3 * 512 * 8192 * 2
    logits = 32 * 128256 * (2 + 4)
    assert max(mlp, logits) < small.working.largest < 2 * max(mlp, logits)
    assert 8 * 128256 * (2 + 4) < small.working.recorded < small.working.largest


def test_the_parts_of_a_card_are_the_card():
    config = replace(Options.from_yaml(CONFIGS / "consumer-24gb.yaml").engine, quantization="bnb-4bit")
    share = share_card(12 * GIB, LLAMA_8B, config)
    assert share.weights < 8_030_261_248 * 2 / 2.5
    held = share.weights + share.working.total + share.cache
    assert 0.9 * (12 * GIB - DRIVER - share.weights - share.working.total) >= share.cache
    assert held + share.left + DRIVER == 12 * GIB


def test_weights_have_the_bytes_of_the_published_model(small):
    assert small.weights == 2 * 3_212_749_824  # parameters of Llama-3.2-3B


def test_a_row_of_the_page_is_what_the_command_prints():
    card, model, quantization, presets = CASES[0]
    [row] = rows([(card, model, quantization, presets[:1])])
    assert as_line(row) in DOC
    assert as_line(HEADER) in DOC


def test_without_triton_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gpu_memory, "has_triton", lambda: False)
    assert "pip install triton" in refusal(gpu_memory.main)


@pytest.mark.slow
def test_the_page_has_the_whole_table():
    found = [line for line in DOC.splitlines() if " GiB | " in line]
    assert found == [as_line(row) for row in rows()]
