"""Latent attention in the whole engine: the cache holds one latent vector a token, and nothing else changes.

Reference: transformers in float32 with eager attention. The models are those of the census.
"""

import functools
import json
import shutil
from pathlib import Path

import census_models
import pytest
import torch
from census_models import eager_logits as wanted
from engine_state import forbid_reading_weights, nothing_left
from helpers import refusal
from streaming_oracle import StreamingOracle
from tiny import tokens
from transformers import AutoConfig, AutoModelForCausalLM

from lean import LLM, EngineConfig, SamplingParams
from lean.cache.plan import LayerShape, plan_cache
from lean.model import latent, shapes
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.quant import BF16
from lean.report import model_report
from lean.store.source import resolve

SERVED = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "sarvam_mla", "youtu")
FORMATS = ("bf16", "int8", "fp8", "int4")
EXACT = EngineConfig(kv_dtype="fp32", dtype="float32", max_model_len=256)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """``built(name)``: the folder of a model of the census, made once."""

    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("latent") / name
        census_models.build(name, folder)
        return folder

    return make


@pytest.fixture(scope="module")
def loaded(built):
    """``loaded(name, deterministic, keep_latent)``: the model as lean loads it, in float32."""

    @functools.cache
    def load(name: str, deterministic: bool = False, keep_latent: bool = True) -> LoadedModel:
        info = inspect_model(resolve(str(built(name))), EXACT, keep_latent=keep_latent)
        return load_model(info, CPU, deterministic)

    return load


def hidden(llm: LLM, ids: list[int]) -> torch.Tensor:
    return torch.cat([rows for _, rows in llm.hidden_states(ids)])


def deterministic(loaded, kv_dtype: str, **options: object) -> LLM:
    config = {"kv_dtype": kv_dtype, "deterministic": True, "max_model_len": 256, **options}
    return LLM(loaded("deepseek_v3", True), EngineConfig(**config))


@pytest.mark.parametrize("name", SERVED)
def test_logits_equal_transformers_whole_and_in_chunks(built, loaded, name):
    assert loaded(name).info.is_latent
    ids = tokens(100)
    want = wanted(built(name), ids)
    for chunk in (512, 13):
        llm = LLM(loaded(name), EngineConfig(kv_dtype="fp32", max_model_len=256, prefill_chunk=chunk))
        got = llm.logits(hidden(llm, ids))[:, : want.shape[1]]
        assert (got - want).abs().max() < max(1e-5, 1e-4 * want.std().item())


def test_the_cache_of_glm_4_7_flash_is_that_of_the_arithmetic():
    """47 layers of 512 + 64 numbers, 53 KiB a token in bf16; 20 heads of 256 + 256 would be 940 KiB."""
    config = AutoConfig.for_model("glm4_moe_lite")
    assert (config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim) == (47, 512, 64)
    shapes.register()
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            config, attn_implementation=shapes.NAME, experts_implementation="batched_mm"
        ).eval()
    expanded = shapes.follow(skeleton, config, "glm", torch.bfloat16)
    plans = [plan_cache(expanded.layers, EngineConfig(kv_dtype="bf16"), BF16)]
    assert latent.install(skeleton)
    followed = shapes.follow(skeleton, config, "glm", torch.bfloat16)
    layers = followed.layers
    assert layers == (LayerShape(20, 1, 576, 512, v_in_k=True),) * 47
    plans.append(plan_cache(layers, EngineConfig(kv_dtype="bf16"), BF16))
    assert [plan.bytes_per_token for plan in plans] == [940 * 1024, 47 * 576 * 2]
    [line] = shapes.notes(followed, config)
    assert "54,144 bytes a token" in line
    assert "962,560" in line
    assert round(47 * 576 * 2 / 1024) == 53


@pytest.mark.parametrize(("kv_dtype", "vector"), [("fp32", 160), ("bf16", 80), ("int8", 44), ("fp8", 44), ("int4", 22)])
def test_bytes_held_are_those_of_one_vector_a_token_and_layer(loaded, kv_dtype, vector):
    """32 + 8 numbers; int8 and fp8 have a scale for each part, int4 has two groups."""
    llm = LLM(loaded("deepseek_v3"), EngineConfig(kv_dtype=kv_dtype, max_model_len=256, kv_residual_length=0))
    assert llm.plan.bytes_per_token == 4 * vector
    llm.add_request(tokens(60), SamplingParams(max_tokens=2, ignore_eos=True))
    held = []
    while llm.has_work:
        llm.step()
        held.append(llm.stats().bytes_held)
    assert max(held) == 2 * 32 * 4 * vector  # two blocks of 32 tokens


def test_a_v_format_has_no_effect_and_a_note_says_so(loaded):
    llm = LLM(loaded("deepseek_v3"), EngineConfig(kv_dtype="k8v4", max_model_len=256, kv_residual_length=0))
    assert llm.plan.bytes_per_token == 4 * 44
    assert [note for note in llm.notes if "k8v4 is int8" in note]


def test_latent_and_expanded_agree_and_say_what_they_cost(built, loaded):
    ids = tokens(90)
    rows = []
    for keep, words in ((True, "expanded K/V would take 1,280"), (False, "would take 320")):
        llm = LLM(loaded("deepseek_v3", False, keep), EXACT)
        rows.append(llm.logits(hidden(llm, ids)))
        assert llm.plan.bytes_per_token == {True: 640, False: 2560}[keep]
        assert any(words in note for note in llm.model.info.notes), llm.model.info.notes
    assert (rows[0] - rows[1]).abs().max() < 1e-4 * rows[1].std()
    assert any("latent vectors take 320 bytes" in note for note in model_report(str(built("deepseek_v3")))["notes"])


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_chunks_and_company_and_preemption_change_no_bit(loaded, kv_dtype):
    prompts = [tokens(count, seed) for seed, count in enumerate((70, 7, 45))]
    want = [hidden(deterministic(loaded, kv_dtype), ids) for ids in prompts]
    assert all(rows.isfinite().all() for rows in want)
    for chunk in (1, 7, 33):
        found = hidden(deterministic(loaded, kv_dtype, prefill_chunk=chunk), prompts[0])
        assert torch.equal(found, want[0]), f"chunk {chunk}"
    alone = [deterministic(loaded, kv_dtype).generate([ids], GREEDY)[0].token_ids for ids in prompts]
    crowd = deterministic(loaded, kv_dtype, prefill_chunk=16, num_blocks=4, max_num_seqs=3, max_model_len=96)
    assert [done.token_ids for done in crowd.generate(prompts, GREEDY)] == alone
    nothing_left(crowd)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_what_the_cache_held_before_does_not_matter(loaded, kv_dtype):
    results = []
    for pattern in (0, 0x7F7F, 0x7E00, -1):
        llm = deterministic(loaded, kv_dtype, prefill_chunk=33, max_num_seqs=1)
        for arena in llm.cache.arenas:
            arena.view(torch.int16).fill_(pattern)
        results.append(hidden(llm, tokens(70)))
    assert results[0].isfinite().all()
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize(("window", "sinks"), [(32, 0), (32, 4), (20, 1)])
def test_a_window_with_sinks_equals_streaming_llm(built, loaded, window, sinks):
    """Only the rotated part of the query is turned back for the sinks."""
    ids = tokens(90, seed=4)
    want = StreamingOracle(built("deepseek_v3"), window, sinks, start=16).hidden(ids)
    for chunk in (512, 7):
        config = EngineConfig(kv_dtype="fp32", window=window, sinks=sinks, prefill_chunk=chunk)
        found = hidden(LLM(loaded("deepseek_v3"), config), ids)
        assert (found - want).abs().max() < 1e-4 * want.abs().max()


def test_a_format_that_cannot_read_the_latent_alone_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    """24 + 8 numbers are rotated in one block, in which V ends."""
    monkeypatch.setitem(census_models.rules()["sizes"], "kv_lora_rank", 24)
    census_models.build("deepseek_v3", tmp_path / "odd")
    forbid_reading_weights(monkeypatch)
    message = refusal(LLM, str(tmp_path / "odd"), EngineConfig(kv_dtype="int8"))
    assert "first 24 numbers of a latent vector of 32, which int8 cannot read alone" in message
    assert model_report(str(tmp_path / "odd"))["bytes_per_token"]["int8"] is None


def test_quantized_checkpoints_run_expanded(built, tmp_path):
    """Their products are other modules, which hold no exact weights."""
    folder = shutil.copytree(built("deepseek_v3"), tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    info = inspect_model(resolve(str(folder)), EngineConfig())
    assert not info.is_latent
    assert info.layers[0] == LayerShape(4, 4, 24, 16)
    assert any("runs with expanded K/V" in note for note in info.notes)
