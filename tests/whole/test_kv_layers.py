"""Formats by layer, end to end: bytes as the arithmetic says, skipped layers exact to the bit, mixed with windows.

How the two options are read is in test_layer_formats.py, how layers become groups in test_plan.py.
"""

import functools

import pytest
import torch
from engine_state import block_table, forbid_reading_weights, hold, nothing_left
from helpers import refusal
from tiny import tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.cache.usage import occupancy
from lean.kernels.parts import read_slots
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.report import kv_report, start_up_line
from lean.store.source import resolve

FOUR = {"num_hidden_layers": 4}
MIXED = {**FOUR, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS = {"llama": FOUR, "gemma3": MIXED, "gpt_oss": MIXED}
IDS = tokens(150)
# Bytes of K and V of one token in one layer: 2 heads of 16 dims.
BYTES = {"fp32": 2 * 2 * 64, "bf16": 2 * 2 * 32, "int8": 2 * 2 * 18, "fp8": 2 * 2 * 18, "int4": 2 * 2 * 9}
BYTES["k8v4"] = 2 * (18 + 9)


@pytest.fixture(scope="module")
def model(tiny):
    @functools.cache
    def read(kind: str) -> LoadedModel:
        source = resolve(str(tiny(kind, **MODELS[kind])))
        return load_model(inspect_model(source, EngineConfig(dtype="float32")), torch.device("cpu"), True)

    return read


def start(model: LoadedModel, kv_dtype: str = "int8", **config: object) -> LLM:
    return LLM(model, EngineConfig(**{"deterministic": True, "kv_dtype": kv_dtype, "max_num_seqs": 2, **config}))


def hidden(llm: LLM, ids: list[int] = IDS) -> torch.Tensor:
    return torch.cat([rows for _, rows in llm.hidden_states(ids)])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are equal to the bit and finite."""
    return bool(a.isfinite().all()) and torch.equal(a.view(torch.int32), b.view(torch.int32))


MIXTURE = "0:fp32,1-2:k8v4,3:int4"
CASES = {
    "ranges": ({"kv_layers": MIXTURE}, ["fp32", "k8v4", "k8v4", "int4"]),
    "the rest is kv_dtype": ({"kv_dtype": "fp8", "kv_layers": "1:int4"}, ["fp8", "int4", "fp8", "fp8"]),
    "from the end": ({"kv_layers": "-2-:bf16"}, ["int8", "int8", "bf16", "bf16"]),
    "auto is the model's dtype": ({"kv_layers": "0-1:auto"}, ["fp32", "fp32", "int8", "int8"]),
    "skipped": ({"kv_dtype": "int4", "kv_skip_layers": "0,-1"}, ["fp32", "int4", "int4", "fp32"]),
    "both": (
        {"kv_dtype": "fp8", "kv_layers": "1-2:k=int8,v=int4", "kv_skip_layers": "3"},
        ["fp8", "k8v4", "k8v4", "fp32"],
    ),
}


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("length", [0, 16])
@pytest.mark.parametrize("name", CASES)
def test_every_layer_has_its_format_and_a_token_its_bytes(model, name, length, window):
    options, formats = CASES[name]
    llm = start(model("llama"), **options, kv_residual_length=length, window=window)
    assert llm.plan.bytes_per_token == sum(BYTES[name] for name in formats)
    found = {layer: pool for pool in llm.stats().pools if not pool.exact for layer in pool.layers}
    assert [found[layer].format for layer in range(4)] == formats
    for pool in llm.stats().pools:
        unit = BYTES["fp32"] if pool.exact else BYTES[pool.format]
        assert pool.bytes_per_token == unit * len(pool.layers)
    exact = sorted(layer for pool in llm.stats().pools if pool.exact for layer in pool.layers)
    quantized = [layer for layer in range(4) if formats[layer] not in ("fp32", "bf16")]
    assert exact == (quantized if length else [])


def test_the_pools_of_a_report_describe_what_is_held(model):
    llm = start(model("llama"), kv_layers=MIXTURE, kv_residual_length=16, window=70, prefill_chunk=32)
    hold(llm, IDS)
    llm.engine.peak = occupancy(llm.engine.manager)
    report = kv_report(llm)
    assert (report["format_k"], report["format_v"]) == ("fp32/int8/int4", "fp32/int4")
    assert report["bytes_per_token"] == 256 + 2 * 54 + 36
    found = [(p["layers"], p["format"], p["exact"], p["window"], p["sinks"]) for p in report["pools"]]
    assert found == [
        ([0], "fp32", False, 70, 4),
        ([1, 2], "k8v4", False, 70, 0),  # sinks are read exact: the exact pool holds them
        ([1, 2], "fp32", True, 16, 4),
        ([3], "int4", False, 70, 0),
        ([3], "fp32", True, 16, 4),
    ]
    for pool, spec in zip(report["pools"], llm.plan.pools):
        assert pool["bytes_held"] == pool["blocks_used"] * spec.block_bytes
        kept = 150 - (128 - pool["window"] + 1) // 32 * 32  # what a token at the last boundary sees
        kept += 32 if pool["sinks"] else 0
        assert pool["tokens_held"] == kept
        assert pool["blocks_used"] == -(-kept // 32)
    assert report["bytes_held"] == sum(pool["bytes_held"] for pool in report["pools"])
    assert all(name in start_up_line(llm) for name in ("fp32", "k8v4", "int4", "window 70"))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("skip", [{"kv_skip_layers": "0,1,2,3"}, {"kv_layers": "0-3:auto"}, {"kv_layers": "0-:fp32"}])
@pytest.mark.parametrize("kind", MODELS)
def test_a_cache_whose_layers_are_all_skipped_is_the_exact_one_to_the_bit(model, kind, skip, window):
    exact = start(model(kind), "auto", window=window)
    llm = start(model(kind), "int4", window=window, **skip)
    assert same(hidden(llm), hidden(exact))
    assert llm.plan == exact.plan


def stored(llm: LLM, layer: int) -> torch.Tensor:
    """K and V of the tokens of IDS that one layer's own pool still holds."""
    request_id = hold(llm, IDS)
    own = llm.cache.layers[layer]
    table = torch.tensor(block_table(llm, request_id, own.group.pool_id))
    size, position = own.pool.layout.block_size, torch.arange(len(IDS))
    slots = (table[position // size] * size + position % size)[table[position // size] > 0]
    rows = torch.cat(read_slots(own.pool.arena, own.pool.layout, own.pool.offset, slots), dim=-1)
    llm.abort(request_id)
    return rows


@pytest.mark.parametrize("kind", MODELS)
def test_skipped_layers_below_all_others_hold_and_compute_what_the_exact_cache_does(model, kind):
    """Layers 0 and 1 exact, 2 and 3 in four bits: K and V up to layer 2 come from exact layers alone."""
    exact, llm = (start(model(kind), "auto"), start(model(kind), "int4", kv_skip_layers="0,1", kv_residual_length=0))
    for layer in (0, 1):
        assert same(stored(llm, layer), stored(exact, layer))
    assert not torch.equal(stored(llm, 3), stored(exact, 3))
    assert not torch.equal(hidden(llm), hidden(exact))


def test_one_quantized_layer_errs_less_than_all(model):
    exact = hidden(start(model("llama"), "auto"))

    def error(**options: str) -> float:
        return (hidden(start(model("llama"), "int4", kv_residual_length=0, **options)) - exact).norm().item()

    none, half, all_but_one = error(), error(kv_skip_layers="0,1"), error(kv_skip_layers="0,1,2")
    assert 0 < all_but_one < half < none


MIXTURES = [
    ("llama", {"kv_layers": MIXTURE, "window": 40, "kv_residual_length": 8}),
    ("llama", {"kv_layers": MIXTURE, "window": 40, "kv_residual_length": 64}),  # the residual covers the window
    ("llama", {"kv_layers": "0-1:int4,2:bf16,3:fp8", "sinks": 40}),
    ("gemma3", {"kv_layers": MIXTURE, "window": 60, "kv_residual_length": 16, "sinks": 1}),
    ("gpt_oss", {"kv_dtype": "fp8", "kv_skip_layers": "0,1", "window": 60, "kv_residual_length": 16}),
    ("gemma3", {"kv_layers": MIXTURE, "kv_residual_length": 16}),
]


@pytest.mark.parametrize(("kind", "options"), MIXTURES)
def test_chunks_forks_and_leftovers_change_no_bit_of_a_mixture(model, kind, options):
    """Every pool of a mixture evicts, forks and reuses blocks by its own rule."""
    want = hidden(start(model(kind), **options))
    for chunk in (7, 64):
        llm = start(model(kind), prefill_chunk=chunk, block_size=8, **options)
        for arena in llm.cache.arenas:
            arena.fill_(0xFF)
        assert same(hidden(llm), want)
    assert same(hidden(start(model(kind), prefill_chunk=1, **options), IDS[:30]), want[:30])
    params = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "ignore_eos": True, "logprobs": 0}
    [alone] = llm.generate([IDS[:70]], SamplingParams(**params))
    first, second = llm.generate([IDS[:70]], SamplingParams(n=2, **params))
    assert (first.token_ids, first.logprobs) == (alone.token_ids, alone.logprobs)
    assert second.token_ids != alone.token_ids
    nothing_left(llm)


def test_a_preempted_request_gives_the_same_as_alone_in_a_mixture(model):
    options = {"kv_layers": MIXTURE, "kv_residual_length": 8, "block_size": 8}
    params = SamplingParams(40, temperature=0.9, seed=5, ignore_eos=True, logprobs=0)
    alone = [start(model("llama"), **options).generate([ids], params)[0] for ids in (IDS[:40], IDS[50:90])]
    llm = start(model("llama"), num_blocks=14, max_model_len=88, **options)
    together = llm.generate([IDS[:40], IDS[50:90]], params)
    assert llm.num_preemptions > 0
    assert [(o.token_ids, o.logprobs) for o in together] == [(o.token_ids, o.logprobs) for o in alone]


def test_a_mixture_saves_what_its_bytes_say(model):
    """Held at 150 tokens in blocks of 8: every layer by its own format."""
    held = {}
    for name, options in {"int8": {}, "mixture": {"kv_layers": MIXTURE}, "exact": {"kv_layers": "0-:fp32"}}.items():
        rest = {} if name == "exact" else {"kv_residual_length": 0}
        llm = start(model("llama"), block_size=8, **options, **rest)
        hidden(llm)
        held[name] = llm.peak_use.bytes_held
    tokens_in_blocks = 152
    assert held["exact"] == tokens_in_blocks * 4 * BYTES["fp32"]
    assert held["int8"] == tokens_in_blocks * 4 * BYTES["int8"]
    assert held["mixture"] == tokens_in_blocks * (BYTES["fp32"] + 2 * BYTES["k8v4"] + BYTES["int4"])


WRONG = [
    ({"kv_layers": "4:int4"}, "layer 4"),
    ({"kv_layers": "-5:int4"}, "layer -5"),
    ({"kv_skip_layers": "0,9"}, "layer 9"),
    ({"kv_layers": "0-2:int4,2:fp8"}, "layer 2 is named twice"),
    ({"kv_layers": "0-2:int4", "kv_skip_layers": "-2"}, "layer 2 is named twice"),
    ({"kv_layers": "3-1:int4"}, "3-1"),
    ({"kv_skip_layers": "0-3", "kv_residual_length": 8}, "no effect"),
    ({"kv_skip_layers": "0,1,2,3", "sinks": 4}, "sinks 4"),
]


@pytest.mark.parametrize(("options", "reason"), WRONG)
def test_layers_that_are_not_there_or_named_twice_are_refused_before_the_weights(tiny, monkeypatch, options, reason):
    forbid_reading_weights(monkeypatch)
    folder = str(tiny("llama", **FOUR))
    assert reason in refusal(lambda: LLM(folder, EngineConfig(**options)))


def test_a_head_dim_that_fits_no_quantized_format_runs_where_those_layers_are_skipped(tiny):
    folder = tiny("llama", num_hidden_layers=2, head_dim=20)
    assert "head_dim 20" in refusal(LLM, str(folder), EngineConfig(kv_skip_layers="0"))
    assert LLM(str(folder), EngineConfig(kv_skip_layers="0,1", window=30)).score(tokens(60)).isfinite().all()
