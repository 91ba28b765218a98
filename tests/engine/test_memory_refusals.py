"""Refusals about memory and length name bytes and options, and the engine starts with every option they suggest."""

from dataclasses import replace

import pytest
import torch
from helpers import refusal
from suggestions import suggestions

from lean import LLM, EngineConfig, SamplingParams
from lean.engine import assemble, engine
from lean.store.source import resolve

MIB = 2**20


@pytest.fixture
def free(monkeypatch):
    """``free(bytes)``: what the machine has from now on."""

    def have(nbytes):
        for module in (assemble, engine):
            monkeypatch.setattr(module, "free_bytes", lambda device: nbytes)

    return have


@pytest.fixture(scope="module")
def folder(tiny):
    return str(tiny("llama", max_position_embeddings=32_768))


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 32_768},
        {"max_model_len": 40_000},
        {"max_model_len": 8000, "kv_memory": 1 * MIB},
        {"max_model_len": 8000, "num_blocks": 4},
        {"num_blocks": 10**8},
        {"kv_memory": 2**40},
        {"max_num_seqs": 4000},
        {"window": 30_000, "max_model_len": 10**6},
    ],
    ids=str,
)
def test_the_engine_starts_with_every_suggestion(folder, free, options):
    free(12 * MIB)
    config = EngineConfig(**options)
    message = refusal(LLM, folder, config)
    assert "12.0 MiB" in message or "positions of this model" in message
    changes = suggestions(message)
    for change in changes:
        llm = LLM(folder, replace(config, **change))
        assert llm.generate("hi", SamplingParams(max_tokens=2))[0].token_ids


def test_a_loaded_model_gets_the_same_advice(folder, free):
    model = LLM(folder, EngineConfig(max_model_len=64)).model
    free(12 * MIB)
    config = EngineConfig(max_model_len=32_768)
    for change in suggestions(refusal(LLM, model, config)):
        LLM(model, replace(config, **change))


def test_a_prompt_that_is_too_long_is_served_with_every_suggestion(folder, free):
    free(12 * MIB)
    prompt = [50] * 6000
    for options in ({"max_model_len": 500}, {"kv_memory": 1 * MIB, "max_num_seqs": 1}, {"num_blocks": 8}):
        config = EngineConfig(**options)
        llm = LLM(folder, config)
        free(12 * MIB - llm.size.nbytes)
        message = refusal(llm.add_request, prompt)
        free(12 * MIB)
        assert "6000 tokens" in message
        assert f"max-model-len is {llm.size.max_model_len}" in message
        changes = suggestions(message)
        assert changes
        other = LLM(folder, replace(config, **changes[0]))
        assert other.generate([prompt], SamplingParams(max_tokens=1))[0].token_ids
        for change in changes[1:]:
            assert LLM(folder, replace(config, **change)).size.max_model_len > 6000
        assert not llm.has_work


def test_a_prompt_beyond_the_model_is_served_by_the_window_that_is_suggested(tiny):
    llm = LLM(str(tiny("llama")), EngineConfig())
    (change,) = suggestions(refusal(llm.add_request, [50] * 600))
    assert set(change) == {"window"}
    assert LLM(str(tiny("llama")), EngineConfig(**change)).generate([[50] * 600], SamplingParams(max_tokens=1))


def test_weights_larger_than_the_free_memory_are_refused_before_they_are_read(folder, free, monkeypatch):
    def read(*args):
        raise AssertionError("weights are read")

    monkeypatch.setattr(assemble, "load_model", read)
    free(300_000)
    message = refusal(LLM, folder, EngineConfig())
    assert "the weights of" in message
    assert "0.6 MiB" in message
    assert "0.3 MiB are free" in message
    assert "--dtype bfloat16" in message
    free(40 * MIB)
    with pytest.raises(AssertionError, match="weights are read"):
        LLM(resolve(folder), EngineConfig(dtype="bfloat16"))


def test_a_narrower_dtype_is_suggested_only_where_it_fits(folder, free):
    free(100_000)
    assert "--dtype" not in refusal(LLM, folder, EngineConfig())
    assert "--dtype" not in refusal(LLM, folder, EngineConfig(dtype="bfloat16"))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("can't allocate memory")]
)
def test_memory_that_is_not_there_after_all_is_a_refusal_with_what_fits(folder, free, monkeypatch, error):
    free(12 * MIB)
    config = EngineConfig(max_model_len=4000, kv_memory=8 * MIB)
    bind = assemble.bind

    def scarce(model, config, plan, size, kernel_name):
        if size.nbytes > 4 * MIB:
            raise error
        return bind(model, config, plan, size, kernel_name)

    monkeypatch.setattr(assemble, "bind", scarce)
    message = refusal(LLM, folder, config)
    assert "12.0 MiB were free" in message
    LLM(folder, replace(config, **suggestions(message)[0]))


def test_other_errors_of_the_first_steps_are_no_lack_of_memory(folder, monkeypatch):
    def fail(*args):
        raise RuntimeError("a kernel is broken")

    monkeypatch.setattr(assemble, "bind", fail)
    with pytest.raises(RuntimeError, match="a kernel is broken"):
        LLM(folder, EngineConfig(max_model_len=64))
