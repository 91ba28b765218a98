"""What chunk, company and memory change in a model's numbers: nothing with ``deterministic``, only rounding without.

Lengths exceed the sliding window of 32 tokens and, where there is a residual, the residual and the exact sinks.
"""

import functools
from pathlib import Path

import pytest
import torch
from helpers import refusal
from norms import exact_norms
from tiny import tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.store.source import resolve

TWO_LAYERS = {"num_hidden_layers": 2}
LOCAL_AND_GLOBAL = {**TWO_LAYERS, "layer_types": ["sliding_attention", "full_attention"]}
KINDS = {"llama": TWO_LAYERS, "gemma3": LOCAL_AND_GLOBAL, "mixtral": TWO_LAYERS, "gpt_oss": TWO_LAYERS}
RESIDUAL = {"kv_residual_length": 8, "sinks": 2}
FORMATS = {"fp32": {}, "bf16": {}} | {
    f"{name} {'with' if rest else 'without'} residual": rest or {"kv_residual_length": 0}
    for name in ("int8", "fp8", "int4", "k8v4", "k=int6,v=int3")
    for rest in (RESIDUAL, {})
}
FORMATS["pc4v3 with residual"] = {**RESIDUAL, "kv_residual_length": 32}
FEW = ("fp32", "bf16", "int8 with residual", "fp8 without residual", "int4 with residual", "k8v4 without residual")
CASES = [(kind, form) for kind in KINDS for form in (FORMATS if kind == "llama" else FEW)]
IDS = tokens(38)


def read(folder: Path, dtype: str) -> LoadedModel:
    """Experts as plain products, as deterministic mode and float64 need them."""
    info = inspect_model(resolve(str(folder)), EngineConfig(dtype=dtype))
    return load_model(info, torch.device("cpu"), deterministic=True)


@pytest.fixture(scope="session")
def model(tiny):
    return functools.cache(lambda kind, dtype="float32": read(tiny(kind, **KINDS[kind]), dtype))


def start(model: LoadedModel, form: str, chunk: int = 512, deterministic: bool = True, **config: object) -> LLM:
    config = {"kv_dtype": form.split()[0], **FORMATS[form], "prefill_chunk": chunk, **config}
    return LLM(model, EngineConfig(deterministic=deterministic, **config))


def outputs(llm: LLM, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states and logits side by side."""
    return torch.cat((hidden, llm.logits(hidden)), dim=1)


def run(llm: LLM, ids: list[int] = IDS) -> torch.Tensor:
    return outputs(llm, torch.cat([rows for _, rows in llm.hidden_states(ids)]))


def bits_differ(a: torch.Tensor, b: torch.Tensor) -> int:
    """Number of rows that are not the same to the bit."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    return (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).any(dim=1).sum().item()


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_one_shot_chunked_and_stepwise_are_the_same_bits(model, kind, form):
    want = run(start(model(kind), form))
    assert want.isfinite().all()
    chunks = (1, 7, 16, 31, 33) if kind == "llama" or "with residual" in form else (7, 16, 31, 33)
    differ = {chunk: bits_differ(run(start(model(kind), form, chunk)), want) for chunk in chunks}
    assert not any(differ.values()), f"rows that differ, by chunk: {differ}"


@pytest.mark.parametrize("form", ["fp32", "int8 with residual", "k8v4 without residual"])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_models_are_row_invariant_too(model, kind, form):
    want = run(start(model(kind, "bfloat16"), form))
    for chunk in (7, 33):
        assert not bits_differ(run(start(model(kind, "bfloat16"), form, chunk)), want)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_widths_that_fill_no_vector_register_change_nothing(tiny, kind, dtype):
    odd = read(tiny(kind, intermediate_size=100, **KINDS[kind]), dtype)
    want = run(start(odd, "fp32"))
    differ = {chunk: bits_differ(run(start(odd, "fp32", chunk)), want) for chunk in (7, 31)}
    assert not any(differ.values()), f"rows that differ, by chunk: {differ}"


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss"])
def test_the_number_of_threads_changes_nothing(model, kind):
    want = run(start(model(kind), "k8v4 with residual"))
    assert not bits_differ(run(start(model(kind), "k8v4 with residual", threads=2)), want)


@pytest.mark.parametrize("form", ["fp32", "int4 with residual", "k8v4 without residual"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_gives_the_same_rows_alone_and_in_company_and_after_a_cancelled_one(model, kind, form):
    prompts = [tokens(length, seed=length) for length in (40, 3, 35, 17)]
    alone = [run(start(model(kind), form), ids) for ids in prompts]
    # Steps of 24 tokens mix pieces of several prompts; blocks of the cancelled request go to the later ones.
    llm = start(model(kind), form, 16, max_num_seqs=3, max_num_batched_tokens=24, num_blocks=6, max_model_len=64)
    cancelled = llm.add_request(tokens(60, seed=9))
    requests = [llm.add_request(ids, keep_hidden=True) for ids in prompts]
    parts = llm.step() + llm.step()
    llm.abort(cancelled)
    while llm.has_work:
        parts += llm.step()
    for request_id, want in zip(requests, alone):
        rows = torch.cat([part.hidden for part in parts if part.request_id == request_id])
        assert not bits_differ(outputs(llm, rows), want)


@pytest.mark.parametrize("kind", ["gemma3", "mixtral"])
def test_greedy_tokens_alone_are_those_in_a_batch(model, kind):
    prompts = [tokens(length, seed=length) for length in (20, 1, 33, 40)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    llm = start(model(kind), "int4 with residual", 16, max_num_batched_tokens=24)
    alone = [llm.generate([ids], params)[0].token_ids for ids in prompts]
    assert [output.token_ids for output in llm.generate(prompts, params)] == alone


def test_a_model_whose_products_cannot_be_tiled_is_refused(tiny):
    float32 = EngineConfig(dtype="float32")
    grouped = load_model(inspect_model(resolve(str(tiny("mixtral", **TWO_LAYERS))), float32), torch.device("cpu"))
    config = EngineConfig(deterministic=True)
    assert "deterministic" in refusal(LLM, grouped, config)
    # One token for one expert is a product of one row, as every dense layer's is; several tokens are not.
    single = tiny("mixtral", num_experts_per_tok=1, **TWO_LAYERS)
    single = load_model(inspect_model(resolve(str(single)), float32), torch.device("cpu"))
    single.module.set_experts_implementation("batched_mm")
    assert "deterministic" in refusal(LLM, single, config)


@pytest.fixture(scope="session")
def exact(tiny):
    @functools.cache
    def exactly(kind: str) -> LoadedModel:
        model = read(tiny(kind, **KINDS[kind]), "float64")
        exact_norms(model.module)
        return model

    return exactly


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_without_deterministic_a_float64_model_differs_by_rounding_only(exact, kind, form):
    want = run(start(exact(kind), form, deterministic=False))
    assert want.dtype is torch.float64
    for chunk in (1, 7, 33) if form in ("fp32", "int4 with residual") else (7, 33):
        got = run(start(exact(kind), form, chunk, deterministic=False))
        assert (got - want).abs().max() < 1e-12


def test_a_mixture_of_experts_runs_in_float64(tiny):
    assert LLM(str(tiny("mixtral", **TWO_LAYERS)), EngineConfig(dtype="float64")).score(IDS).isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
def test_the_first_run_of_an_engine_gives_the_bits_of_the_third(model, form):
    llm = start(model("gemma3"), form, 16, deterministic=False)
    first, _, third = (run(llm) for _ in range(3))
    assert not bits_differ(first, third)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_the_cache_held_before_does_not_matter(model, kind, form):
    """0x7F is e4m3's NaN, 0x7E00 fp16's, and all ones are every float's."""
    results = []
    for pattern in (0, 0x7F7F, 0x7E00, -1):
        llm = start(model(kind), form, 33, deterministic=False, max_num_seqs=1, max_model_len=128)
        for arena in llm.cache.arenas:
            arena.view(torch.int16).fill_(pattern)
        results.append(torch.cat([run(llm, tokens(length)) for length in (1, 31, 33, 70)]))
    assert results[0].isfinite().all()
    for result in results[1:]:
        assert not bits_differ(result, results[0])
