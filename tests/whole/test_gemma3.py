"""Gemma-3-270M: one KV head of 256 dims, 15 sliding layers of 512 tokens and 3 with full attention.

The model is no part of the project: LEAN_GEMMA3 names its GGUF file (gemma-3-270m, Q4_K_M); without it these tests
are skipped. The figures come from the simulation that tests/whole/test_smollm2.py speaks of, over 3,072 tokens. Over
the first 1,024 its own perplexities move by 0.2 % with the chunk: float32 sums flip codes, and layer 11 amplifies that.
"""

import os
from pathlib import Path

import pytest
import torch
from helpers import one_sequence

from lean import LLM, EngineConfig
from lean.cache.plan import LayerShape, plan_cache
from lean.eval.corpus import python_docs, text_hash
from lean.eval.score.fidelity import compare, read_reference
from lean.quant import BF16

GGUF = Path(os.environ.get("LEAN_GEMMA3", "/nowhere"))
needs_model = pytest.mark.skipif(not GGUF.is_file(), reason="LEAN_GEMMA3 names no file")
TEXT_SHA256 = "71f2ff5d99bdc1f9c48c5c2353ad138201c5ca1c377e0226857ef8fa89b8bcee"
SHAPES = [LayerShape(4, 1, 256, 256, 0 if index % 6 == 5 else 512) for index in range(18)]
SCORED = 3072
# kv_dtype, window, residual length, perplexity, its tolerance, mean KLD
ROWS = (
    ("int8", None, 0, 12.3155, 0.005, 0.000965),
    ("fp8", None, 0, 12.4220, 0.005, 0.007074),
    ("k8v4", None, None, 12.2755, 0.005, 0.000665),
    ("int4", None, None, 12.7261, 0.005, 0.037111),
    ("fp32", 508, None, 13.3806, 0.03, None),
    ("k8v4", 508, None, 13.3904, 0.03, None),
)


def test_bytes_at_4096_tokens_are_those_of_15_sliding_and_3_full_layers():
    plan = plan_cache(SHAPES, EngineConfig(kv_residual_length=0), BF16)
    vectors = 2 * (256 + 2)  # K and V of one token in one layer, int8 codes and an fp16 scale each
    block = 32 * vectors
    # A window of 512 may touch 17 blocks of 32.
    assert plan.bytes_at(4096) == 3 * 128 * block + 15 * 17 * block
    assert plan.bytes_at_bf16(4096) == (3 * 4096 + 15 * 512) * 2 * 2 * 256
    # The exact copies: 64 tokens and 4 sinks touch at most 4 blocks.
    residual = plan_cache(SHAPES, EngineConfig(), BF16)
    assert residual.bytes_at(4096) - plan.bytes_at(4096) == 18 * 4 * 32 * 2 * 2 * 256


@pytest.fixture(autouse=True)
def _two_threads(_one_thread):
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def exact():
    return LLM(str(GGUF), EngineConfig(kv_dtype="fp32", dtype="float32", max_num_seqs=1, max_model_len=4096))


@pytest.fixture(scope="module")
def token_ids(exact):
    if text_hash(python_docs()) != TEXT_SHA256:
        pytest.skip("another Python has other help topics, and the figures are of Python 3.11's")
    return exact.model.tokenizer(python_docs()[:40_000])["input_ids"]


@pytest.fixture(scope="module")
def reference(exact, token_ids):
    return read_reference(exact, one_sequence(token_ids[:SCORED]))


@needs_model
@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "window", "residual", "perplexity", "tolerance", "kld"), ROWS)
def test_rows_are_those_of_the_independent_simulation(
    exact, reference, kv_dtype, window, residual, perplexity, tolerance, kld
):
    config = EngineConfig(kv_dtype, window=window, kv_residual_length=residual, max_num_seqs=1, max_model_len=4096)
    result = compare(reference, LLM(exact.model, config))
    print(f"{kv_dtype} window {window} R {residual}: {result}")
    assert result.ppl == pytest.approx(perplexity, rel=tolerance)
    if kld is not None:
        assert result.kld_mean == pytest.approx(kld, rel=0.25 if residual == 0 else 0.15)


@needs_model
@pytest.mark.slow
def test_bytes_held_after_4096_tokens_are_what_the_plan_says(exact, token_ids):
    llm = LLM(exact.model, EngineConfig(kv_residual_length=0, max_num_seqs=1, max_model_len=4096))
    held = []
    for _ in llm.hidden_states(token_ids[:4096]):
        held.append(llm.stats().bytes_held)
    assert held[-1] <= llm.plan.bytes_at(4096)
    full, sliding = llm.stats().pools
    assert (len(full.layers), len(sliding.layers)) == (3, 15)
