"""A user's window over a whole model: equal to a band mask, in any chunks, and served or refused in every combination.

How far a window reaches is in test_window_reach.py.
"""

import functools
from pathlib import Path

import pytest
import torch
from engine_state import forbid_reading_weights, hold, nothing_left
from helpers import refusal
from tiny import tokens
from transformers import AutoModelForCausalLM
from windowed import IDS, LOCAL_AND_GLOBAL, MODELS, QUANTIZED, TWO, hidden, loader, residual, same, start

from lean import LLM, EngineConfig, SamplingParams
from lean.errors import RequestError
from lean.model.info import inspect_model
from lean.model.load import load_model
from lean.report import start_up_line
from lean.store.source import resolve


@pytest.fixture(scope="module")
def model(tiny):
    return loader(tiny)


# --- against an explicit mask ---


@functools.cache
def eager(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def banded(folder: Path, ids: list[int], window: int) -> torch.Tensor:
    """transformers' logits under a band mask."""
    i, j = torch.arange(len(ids))[:, None], torch.arange(len(ids))
    seen = (j <= i) & (i - j < window)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    return eager(folder)(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0].clone()


@pytest.mark.parametrize(
    ("prompt", "window", "chunk"), [(512, 128, 128), (384, 128, 128), (300, 128, 128), (128, 128, 32), (300, 20, 512)]
)
def test_a_prompt_longer_than_the_window_equals_a_band_mask(tiny, model, prompt, window, chunk):
    """40 steps of decode follow the prompt."""
    ids = tokens(prompt, seed=3)
    llm = start(model("llama, 2 layers"), window=window, sinks=0, prefill_chunk=chunk)
    want = banded(tiny("llama", **TWO), ids, window)
    assert (llm.logits(hidden(llm, ids)) - want).abs().max() < 1e-5
    [answer] = llm.generate([ids], SamplingParams(40, temperature=0, ignore_eos=True, logprobs=0))
    want = banded(tiny("llama", **TWO), ids + answer.token_ids[:-1], window)[prompt - 1 :]
    want = want.log_softmax(-1)
    found = torch.tensor([entry.logprob for entry in answer.logprobs])
    assert (found - want.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]).abs().max() < 1e-5


# --- chunks ---

GRID = [
    (kv_dtype, *rule)
    for kv_dtype in ("fp32", *QUANTIZED)
    for rule in [(33, 4, 0), (70, 1, 16), (20, 40, 32)]
    if kv_dtype != "fp32" or not rule[2]
]


@pytest.mark.parametrize(("kv_dtype", "window", "sinks", "length"), GRID)
def test_one_shot_chunked_and_stepwise_are_the_same_bits_under_a_window(model, kv_dtype, window, sinks, length):
    """Chunks longer than the window, W <= R, and chunks of one token for at least two windows."""
    options = {"window": window, "sinks": sinks, **residual(kv_dtype, length)}
    want = hidden(start(model("llama, 2 layers"), kv_dtype, **options), IDS)
    for chunk in (7, 33, 64):
        got = hidden(start(model("llama, 2 layers"), kv_dtype, prefill_chunk=chunk, **options), IDS)
        assert same(got, want), f"chunk {chunk}"
    steps = 50 if window < 40 else 76
    assert same(
        hidden(start(model("llama, 2 layers"), kv_dtype, prefill_chunk=1, **options), IDS[:steps]), want[:steps]
    )


@pytest.mark.parametrize(("kv_dtype", "length"), [("int4", 8), ("fp8", 0), ("k8v4", 64)])
@pytest.mark.parametrize("name", ["gemma3, mixed", "gpt_oss, mixed", "phi3, half of the dims"])
def test_chunks_change_no_bit_of_other_models_under_a_window(model, name, kv_dtype, length):
    options = {"window": 40, "sinks": 4, **residual(kv_dtype, length)}
    want = hidden(start(model(name), kv_dtype, **options), IDS)
    for chunk in (7, 64):
        assert same(hidden(start(model(name), kv_dtype, prefill_chunk=chunk, **options), IDS), want)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_chunks_and_threads_change_no_bit_of_bfloat16_models_under_a_window(tiny, kind, kv_dtype):
    """The query that is turned back is rounded to bfloat16 row by row."""
    folder = tiny(kind, **{"llama": TWO, "gemma3": LOCAL_AND_GLOBAL}[kind])
    narrow = load_model(inspect_model(resolve(str(folder)), EngineConfig(dtype="bfloat16")), torch.device("cpu"), True)
    rest = residual(kv_dtype, 8) if kv_dtype == "int8" else {}
    want = hidden(start(narrow, kv_dtype, window=40, **rest), IDS)
    assert same(hidden(start(narrow, kv_dtype, window=40, prefill_chunk=7, **rest), IDS), want)
    assert same(hidden(start(narrow, kv_dtype, window=40, prefill_chunk=64, threads=2, **rest), IDS), want)


@pytest.mark.parametrize("window", [1, 31, 33])
@pytest.mark.parametrize("sinks", [0, 3])
def test_prefill_and_decode_agree_around_the_length_of_the_window(model, window, sinks):
    """For every length from W - 1 to W + S + 2 the last row is computed in one chunk and in a single step."""
    options = {"window": window, "sinks": sinks, "kv_residual_length": 0}
    one_shot, stepwise = (start(model("llama"), "int8", prefill_chunk=c, **options) for c in (512, 1))
    steps = hidden(stepwise, IDS[: window + sinks + 2])
    for length in range(max(1, window - 1), window + sinks + 3):
        assert same(hidden(one_shot, IDS[:length])[-1], steps[length - 1])


@pytest.mark.parametrize("length", [127, 128, 129, 1023])
def test_the_last_piece_of_a_prompt_evicts_nothing_too_early(model, length):
    """No padding enters the cache: it holds exactly the tokens of the prompt."""
    ids = tokens(length, seed=5)
    options = {"window": 64, "sinks": 4, "kv_residual_length": 16}
    llm = start(model("llama"), "int8", prefill_chunk=128, **options)
    rows = hidden(llm, ids)
    chunk = 1 if length == 129 else 9
    assert same(rows, hidden(start(model("llama"), "int8", prefill_chunk=chunk, **options), ids))
    hold(llm, ids)
    assert llm.stats().tokens_held == length
    boundary = length // 32 * 32  # what a token there sees is kept
    quantized, exact = llm.stats().pools
    assert quantized.tokens_held == length - (boundary - 64 + 1) // 32 * 32  # sinks lie in the exact pool alone
    assert exact.tokens_held == length - max(0, (boundary - 16 + 1) // 32 - 1) * 32  # and keep its first block


# --- lengths ---


def test_a_text_longer_than_the_model_is_refused_without_a_window_and_served_with_one(tiny):
    folder = tiny("llama", max_position_embeddings=64, **TWO)
    plain = LLM(str(folder))
    # The last token of a text is only predicted, so it needs no place in the cache.
    for call in (lambda: plain.score(tokens(201)), lambda: plain.generate([tokens(200)])):
        with pytest.raises(RequestError) as caught:
            call()
        assert all(word in str(caught.value) for word in ("200", "64", "shorten the prompt"))
    assert "--window" in refusal(LLM, str(folder), EngineConfig(max_model_len=200))
    llm = LLM(str(folder), EngineConfig(window=32, sinks=4))
    assert llm.score(tokens(200)).isfinite().all()
    [answer] = llm.generate([tokens(100)], SamplingParams(300, temperature=0, ignore_eos=True, logprobs=0))
    assert len(answer.token_ids) == 300
    assert all(entry.logprob > -100 for entry in answer.logprobs)
    assert refusal(LLM(str(folder), EngineConfig(window=32, max_model_len=150)).score, tokens(200))


# --- the grid of options ---


@pytest.mark.parametrize("kv_dtype", ["fp16", "int8", "fp8", "int4"])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("name", ["llama, 2 layers", "gemma3, mixed", "qwen2, 2 layers"])
def test_every_cell_of_the_grid_works_or_is_refused_before_loading(
    tiny, model, monkeypatch, name, window, sinks, kv_dtype
):
    """No combination fails only at the first request."""
    rests = [{}, residual(kv_dtype, 0), residual(kv_dtype, 40)]
    if not window and sinks:
        rest = {"kv_dtype": kv_dtype, **rests.pop(1)}
        forbid_reading_weights(monkeypatch)
        kind, config = MODELS[name]
        folder = str(tiny(kind, **config))
        assert "sinks 4" in refusal(LLM, folder, EngineConfig(sinks=sinks, **rest))
        rests = rests if kv_dtype != "fp16" else []
    for rest in rests if kv_dtype != "fp16" else rests[:1]:
        llm = start(model(name), kv_dtype, window=window, sinks=sinks, deterministic=False, **rest)
        params = SamplingParams(6, temperature=0, ignore_eos=True, n=2, logprobs=0)
        answers = llm.generate([IDS[:90], IDS[:10]], params)
        assert [answer.finish_reason for answer in answers] == ["length"] * 4
        nothing_left(llm)


# --- notes about windows without effect or with risk ---


def test_a_window_that_reaches_no_layer_is_reported(model):
    """Every layer of Mistral has a sliding window, so a user's window has no effect, and a note must say so."""
    llm = start(model("mistral"), window=100)  # or a refusal
    assert any("window" in note for note in llm.notes)
    assert "window 100" not in start_up_line(llm)


def test_a_window_longer_than_the_positions_of_the_model_is_reported(tiny):
    """Under such a window a row sees keys at distances for which the model was not trained."""
    folder = tiny("llama", max_position_embeddings=64, **TWO)
    llm = LLM(str(folder), EngineConfig(window=500))  # or a refusal
    assert any("500" in note and "64" in note for note in llm.notes)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "k8v4", "int4"])
def test_learned_sink_logits_and_a_quantized_cache_are_not_taken_for_a_wrong_rotation(tiny, kv_dtype):
    """With sink logits a lone token's attention depends on the rounding of its key, and so on its position."""
    folder = tiny("gpt_oss", num_hidden_layers=8)
    assert (
        LLM(str(folder), EngineConfig(kv_dtype=kv_dtype, kv_residual_length=0, window=100)).score(IDS).isfinite().all()
    )
