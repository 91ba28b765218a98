"""Every option does what it says, or is refused with one line that names it."""

import math
from dataclasses import fields

import pytest
import torch
from helpers import refusal

from lean.config import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_RESIDUAL_LENGTH,
    DEFAULT_SINKS,
    EngineConfig,
)
from lean.llm import LLM
from lean.sampling_params import SamplingParams
from lean.units import parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("3KB", 3000),
        ("3KiB", 3072),
        ("2k", 2048),
        ("512MiB", 512 * 2**20),
        ("512MB", 512 * 10**6),
        ("512m", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 1_610_612_736),
        ("2G", 2**31),
        ("2gi", 2**31),
        (" 7 MiB ", 7 * 2**20),
    ],
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


BAD_SIZES = ["", " ", "MiB", "-1GiB", "1,5GB", "1e9", "nan", "inf", "1TB", "1 GiB x", "0x10", ".5GB", "5.GB", "1 2MB"]


@pytest.mark.parametrize("text", [*BAD_SIZES, "9" * 400 + "GiB"])
def test_a_text_that_is_not_a_size_is_refused(text):
    message = refusal(parse_size, text)
    assert "MiB" in message


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "kv_dtype": ("int2", "", "k=int8", "k=int8,k=int4", "k=int8,v=auto", "int8,int4", "k=int8,v=int4,x=int8"),
        "block_size": (0, 1, 31, 48, 512, -32),
        "dtype": ("int8", "half", "", "torch.float32"),
        "kv_residual_length": (-1,),
        "sinks": (-1,),
        "window": (0, -1),
        "num_blocks": (0, -1),
        "kv_memory": (0, -1),
        "prefix_tail_memory": (-1,),
        "prefix_cache_dir": ("", 5),
        "prefix_cache_size": (0, -1),
        "max_model_len": (0, -5),
        "prefill_chunk": (0, -1),
        "max_num_seqs": (0, -1),
        "max_num_batched_tokens": (0, -1),
        "threads": (0, -1),
    }.items(),
)
def test_impossible_options_are_refused_by_name(field, values):
    for value in values:
        message = refusal(EngineConfig, **{field: value})
        if field == "kv_dtype":
            assert "KV format" in message
        else:
            assert field.replace("_", "-") in message
            assert repr(value) in message


@pytest.mark.parametrize("field", ["num_blocks", "prefill_chunk", "kv_residual_length"])
def test_counts_are_whole_numbers(field):
    for value in (1.5, math.nan, "32", True):
        assert field.replace("_", "-") in refusal(EngineConfig, **{field: value})


def test_two_sizes_of_the_cache_are_refused():
    message = refusal(EngineConfig, num_blocks=4, kv_memory=2**20)
    assert all(word in message for word in ("num-blocks", "kv-memory"))


def test_memory_for_tails_needs_the_prefix_cache():
    assert "prefix-tail-memory" in refusal(EngineConfig, prefix_cache=False, prefix_tail_memory=1)
    EngineConfig(prefix_cache=False, prefix_tail_memory=0)


def test_a_folder_needs_the_prefix_cache_and_its_size_a_folder():
    assert "prefix-cache-dir" in refusal(EngineConfig, prefix_cache=False, prefix_cache_dir="x")
    assert "prefix-cache-size" in refusal(EngineConfig, prefix_cache_size=5)


def test_every_default_is_accepted_and_frozen():
    config = EngineConfig()
    for field in fields(config):
        with pytest.raises(AttributeError):
            setattr(config, field.name, None)


@pytest.mark.parametrize(
    ("config", "quantized", "expected"),
    [
        ({}, True, (DEFAULT_RESIDUAL_LENGTH, DEFAULT_SINKS)),
        ({}, False, (0, 0)),
        ({"kv_residual_length": 0}, True, (0, 0)),
        ({"kv_residual_length": 0, "sinks": 0}, True, (0, 0)),
        ({"kv_residual_length": 0, "sinks": 0}, False, (0, 0)),
        ({"kv_residual_length": 7}, True, (7, DEFAULT_SINKS)),
        ({"kv_residual_length": 7, "sinks": 0}, True, (7, 0)),
        ({"sinks": 9}, True, (DEFAULT_RESIDUAL_LENGTH, 9)),
        ({"window": 50}, False, (0, DEFAULT_SINKS)),
        ({"window": 50, "sinks": 7}, False, (0, 7)),
        ({"window": 50, "kv_residual_length": 0, "sinks": 7}, True, (0, 7)),
        ({"window": 50, "sinks": 0}, True, (DEFAULT_RESIDUAL_LENGTH, 0)),
    ],
)
def test_residual_and_sinks(config, quantized, expected):
    assert EngineConfig(**config).residual(quantized) == expected


def test_a_residual_without_effect_is_refused():
    message = refusal(EngineConfig(kv_dtype="bf16", kv_residual_length=64).residual, False)
    assert all(word in message for word in ("kv-residual-length 64", "bf16"))
    assert "sinks 4" in refusal(EngineConfig(kv_residual_length=0, sinks=4).residual, True)


def test_the_advice_for_sinks_without_a_residual_can_be_followed():
    message = refusal(EngineConfig(kv_dtype="bf16", sinks=4).residual, False)
    assert "sinks 4" in message
    assert "quantized" in message, "a residual, which the advice asks for, is refused for bf16"


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "max_tokens": (0, -1, 1.5, "10", None, True, math.nan, math.inf),
        "temperature": (-1, -1e-9, math.nan, math.inf, -math.inf, "0.5", True),
        "top_p": (0, -0.1, 1.0001, math.nan, math.inf, "1", True),
        "top_k": (-1, 1.5, "10", True, math.nan),
        "seed": (-1, 2**63, 1.5, "10", True),
    }.items(),
)
def test_impossible_sampling_parameters_are_refused_by_name(field, values):
    for value in values:
        message = refusal(SamplingParams, **{field: value})
        assert field.replace("_", "-") in message
        assert repr(value) in message


def test_sampling_parameters_at_the_edges_are_accepted():
    SamplingParams(max_tokens=1, temperature=0, top_p=1, top_k=0, seed=0)
    SamplingParams(max_tokens=2**63, temperature=1e-8, top_p=1e-9, top_k=10**9, seed=2**63 - 1)
    SamplingParams(temperature=1e9)
    assert SamplingParams().max_tokens == DEFAULT_MAX_TOKENS


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny("llama", num_hidden_layers=1)), EngineConfig(max_model_len=96))


@pytest.mark.parametrize("max_tokens", [2**31, 2**63, 10**30])
def test_a_huge_max_tokens_ends_with_the_model_and_takes_no_blocks_ahead(llm, max_tokens):
    request_id = llm.add_request([5] * 80, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert llm.stats().bytes_held == 0
    llm.step()
    assert [pool.blocks_used for pool in llm.stats().pools] == [3, 3]
    tokens = 1
    while outputs := llm.step():
        tokens += len(outputs[0].token_ids)
    assert outputs == []
    assert tokens == 96 - 80
    assert llm.stats().bytes_held == 0
    llm.abort(request_id)


def test_the_threads_asked_for_are_used(llm):
    LLM(llm.model, EngineConfig(threads=2))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "value", [2**31, 2**63, 10**30, 10**6000], ids=["32 bits", "64 bits", "more", "thousands of digits"]
)
def test_a_number_beyond_every_machine_is_refused_with_the_range(value):
    counts = [item.name for item in fields(EngineConfig) if "int" in str(item.type).split(" | ")]
    assert len(counts) == 13
    for field in counts:
        if field in ("kv_memory", "prefix_tail_memory", "prefix_cache_size") and value < 2**62:
            continue
        message = refusal(EngineConfig, **{field: value})
        assert field.replace("_", "-") in message
        assert "must be from " in message or "must be one of " in message
        assert len(message) < 250
    assert "from 1 to 65536" in refusal(SamplingParams, n=value)
