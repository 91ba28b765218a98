"""Kinds of models beyond plain decoders: shared K/V, latent attention, heads by layer, multimodal checkpoints.

Reference: transformers in float32 with eager attention. The models are those of the census, with sliding windows of 32.
"""

import functools
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import census_models
import pytest
import torch
from census_models import eager_logits as wanted
from engine_state import forbid_reading_weights, manager, nothing_left, runner, wrap_part
from helpers import refusal
from safetensors.torch import load_file, save_file
from tiny import tokens
from transformers import AutoModelForCausalLM

from lean import LLM, EngineConfig, SamplingParams
from lean.engine import decode_steps
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.report import kv_report, start_up_line
from lean.store.source import resolve
from lean.units import mib

# Shared K/V, latent attention, heads by layer, a wrapper, and layers that drop keyword arguments.
KINDS = ("gemma3n_text", "gemma4_text+shared", "deepseek_v3", "laguna", "gemma3", "stablelm")
SHARED = KINDS[:2]
# Gated delta rule with M-RoPE, short convolutions, state spaces beside layers of experts, and both in each layer.
HYBRIDS = ("qwen3_5_text", "lfm2", "nemotron_h", "falcon_h1")
EXACT = EngineConfig(kv_dtype="fp32", dtype="float32", max_model_len=256)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """``built(name)``: the folder of a model of the census, made once."""

    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("kind") / name.replace("+", "-")
        census_models.build(name, folder)
        return folder

    return make


@pytest.fixture(scope="module")
def loaded(built):
    """``loaded(name)``: the model as lean loads it, in float32."""

    @functools.cache
    def load(name: str) -> LoadedModel:
        return load_model(inspect_model(resolve(str(built(name))), EXACT), torch.device("cpu"))

    return load


def logits(llm: LLM, ids: list[int]) -> torch.Tensor:
    return llm.logits(torch.cat([rows for _, rows in llm.hidden_states(ids)]))


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_transformers_whole_and_in_chunks(built, loaded, name):
    ids = tokens(100)
    want = wanted(built(name), ids)
    bound = max(1e-5, 1e-4 * want.std().item())
    for chunk in (512, 13, 1):
        got = logits(LLM(loaded(name), EngineConfig(kv_dtype="fp32", max_model_len=256, prefill_chunk=chunk)), ids)
        assert (got[:, : want.shape[1]] - want).abs().max() < bound


@torch.inference_mode()
def wanted_in_chunks(folder: Path, ids: list[int], chunk: int, first: int = 0) -> torch.Tensor:
    """transformers' logits with its own cache. ``first``: tokens of the first chunk, if it has another length."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    cache, rows = None, []
    starts = [0, *range(first or chunk, len(ids), chunk), len(ids)]
    for start, end in itertools.pairwise(starts):
        out = model(input_ids=torch.tensor([ids[start:end]]), cache=cache, use_cache=True)
        cache = out.cache
        rows.append(out.logits[0])
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [512, 13, 1])
@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_of_a_hybrid_equal_transformers_in_the_same_chunks(built, loaded, name, chunk):
    """transformers itself computes other numbers in other chunks: nemotron_h 0.005 apart in single tokens."""
    ids = tokens(100)
    want = wanted_in_chunks(built(name), ids, chunk)
    got = logits(LLM(loaded(name), EngineConfig(kv_dtype="fp32", max_model_len=256, prefill_chunk=chunk)), ids)
    assert (got[:, : want.shape[1]] - want).abs().max() < max(1e-5, 1e-4 * want.std().item())


@pytest.mark.parametrize("name", KINDS + HYBRIDS)
def test_company_and_preemption_change_no_greedy_token(loaded, name):
    prompts = [tokens(count, seed) for seed, count in enumerate((40, 7, 65))]
    alone = [LLM(loaded(name), EXACT).generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    config = EngineConfig(kv_dtype="fp32", max_model_len=96, prefill_chunk=16, num_blocks=4, max_num_seqs=3)
    llm = LLM(loaded(name), config)
    assert [done.token_ids for done in llm.generate(prompts, GREEDY)] == alone
    nothing_left(llm)


@pytest.mark.parametrize("name", SHARED)
def test_a_layer_that_reads_the_kv_of_another_stores_nothing(loaded, name):
    llm = LLM(loaded(name), EngineConfig(max_model_len=256, kv_residual_length=0))
    layers = llm.model.info.layers
    owners = [layer for layer in layers if layer.kv_layer is None]
    assert len(owners) == {"gemma3n_text": 6, "gemma4_text+shared": 6}[name]
    # int8: one byte a number and a scale of two bytes a vector, for K and V.
    expected = sum(layer.num_kv_heads * (layer.k_dim + layer.v_dim + 4) for layer in owners)
    assert llm.plan.bytes_per_token == expected
    assert sorted(index for group in llm.plan.groups for index in group.layers) == [
        index for index, layer in enumerate(layers) if layer.kv_layer is None
    ]


@pytest.mark.parametrize("name", SHARED)
def test_shared_kv_is_read_as_its_owner_wrote_it(built, loaded, name):
    """Poison: memory that no layer wrote must not be read, by the layers without K/V of their own neither."""
    llm = LLM(loaded(name), EXACT)
    for arena in llm.engine.runner.cache.arenas:
        arena.fill_(0xFF)  # NaN in float32
    ids = tokens(70)
    want = wanted(built(name), ids)
    assert (logits(llm, ids) - want).abs().max() < max(1e-5, 1e-4 * want.std().item())


def test_layers_that_share_kv_cannot_have_different_formats(loaded):
    layers = loaded("gemma3n_text").info.layers
    reader = next(index for index, layer in enumerate(layers) if layer.kv_layer is not None)
    message = refusal(LLM, loaded("gemma3n_text"), EngineConfig(kv_layers=f"{reader}:int4", kv_residual_length=0))
    assert f"layer {reader} reads the K/V of layer {layers[reader].kv_layer}" in message


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_holds_the_states_that_transformers_holds(built, loaded, name):
    model = AutoModelForCausalLM.from_pretrained(built(name), dtype=torch.float32).eval()
    with torch.inference_mode():
        cache = model(input_ids=torch.tensor([tokens(20)]), use_cache=True).cache
    theirs = [
        state.nbytes
        for layer in cache.layers
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
        for state in states.values()
        if state is not None
    ]
    llm = LLM(loaded(name), EXACT)
    assert llm.plan.state_bytes == sum(theirs) > 0
    assert len(llm.plan.states) == len(theirs)
    slots = EXACT.max_num_seqs + llm.size.num_tails + 1  # and one for padding
    assert llm.cache.states.nbytes == slots * llm.plan.state_bytes
    pools = sum(arena.nbytes for arena in llm.cache.arenas)
    assert llm.size.nbytes == pools + llm.cache.states.nbytes
    request = llm.add_request(tokens(20), GREEDY)
    llm.step()
    use = llm.stats()
    assert use.state_bytes == llm.plan.state_bytes
    assert use.bytes_held == use.state_bytes + sum(pool.bytes_held for pool in use.pools)
    llm.abort(request)
    nothing_left(llm)


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_others_and_of_nobody_are_not_read(built, loaded, name):
    llm = LLM(loaded(name), EXACT)
    for state in llm.plan.states:
        llm.cache.states[state.key].fill_(float("nan"))
    for ids in (tokens(70), tokens(1, 3), tokens(30, 4)):  # in the slot that the first one leaves
        want = wanted(built(name), ids)
        assert (logits(llm, ids) - want).abs().max() < max(1e-5, 1e-4 * want.std().item())


@pytest.mark.parametrize("name", HYBRIDS)
def test_forks_of_a_hybrid_go_on_from_copies_of_its_states(built, loaded, name):
    """Three answers differ, and each has the log-probabilities that its tokens alone lead to."""
    prompt = tokens(21)
    llm = LLM(loaded(name), EngineConfig(kv_dtype="fp32", max_model_len=96, max_num_seqs=4))
    drawn = llm.generate(
        [prompt], SamplingParams(max_tokens=6, temperature=2.0, seed=5, n=3, logprobs=1, ignore_eos=True)
    )
    assert len({tuple(one.token_ids) for one in drawn}) == 3
    for one in drawn:
        rows = wanted_in_chunks(built(name), [*prompt, *one.token_ids], 1, first=len(prompt))
        rows = rows[-7:-1].log_softmax(-1)
        told = torch.tensor([entry.logprob for entry in one.logprobs])
        assert (rows.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0] - told).abs().max() < 1e-4
    nothing_left(llm)


class RunsWhileItRecords:
    """Stands in for CUDA graphs, whose steps run twice before they are recorded."""

    def __init__(self, ran):
        self.ran = ran

    def __call__(self, step):
        step()
        step()
        return lambda: self.ran.append(1) or step()

    def forget(self):
        pass


@pytest.mark.parametrize("name", HYBRIDS)
def test_recorded_decode_steps_of_a_hybrid_equal_eager_ones(loaded, name, monkeypatch):
    """Their rows are padded, and the states of all rows are copied: sequences end and join, and slots change.

    Steps for wider tables are made when a sequence first needs them, and run while they are made.
    """
    monkeypatch.setattr(decode_steps, "SHORTEST_REACH", 16)
    prompts = [tokens(count, count) for count in (30, 1, 9, 17)]
    params = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (4, 9, 7, 6)]

    def answers(recorded: bool) -> list[list[int]]:
        llm, ran = LLM(loaded(name), EngineConfig(kv_dtype="fp32", max_model_len=96, max_num_seqs=3)), []
        if recorded:
            runner(llm).prepare_decode(3, 96, None, RunsWhileItRecords(ran))
        requests = [llm.add_request(*request) for request in zip(prompts, params)]
        found = {request: [] for request in requests}
        while llm.has_work:
            for output in llm.step():
                found[output.request_id] += output.token_ids
        nothing_left(llm)
        assert (len(ran) > 5) == recorded
        return [found[request] for request in requests]

    assert answers(True) == answers(False)


COMPILED = ("gemma3n_text", "deepseek_v3", "qwen3_5_text", "falcon_h1")  # the others are slow tests


@pytest.mark.parametrize(
    "name",
    [name if name in COMPILED else pytest.param(name, marks=pytest.mark.slow) for name in (*KINDS, *HYBRIDS)],
)
def test_compiled_layers_of_all_kinds_equal_eager_ones(loaded, name, home):
    """Layers that are alike share a program: each must get its own weights, cache and states."""
    prompts = [tokens(count, count) for count in (30, 1, 9, 40)]
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=0)

    def answers(compiled: bool) -> tuple[list[list[int]], torch.Tensor]:
        llm = LLM(loaded(name), EngineConfig(kv_dtype="fp32", max_model_len=96, max_num_seqs=2))
        if compiled:
            runner(llm).prepare_decode(2, 96, "eager", None)
        outputs = llm.generate(prompts, params)
        values = torch.tensor([entry.logprob for output in outputs for entry in output.logprobs])
        return [output.token_ids for output in outputs], values

    (ids, found), (want_ids, want) = answers(True), answers(False)
    assert ids == want_ids
    assert (found - want).abs().max() < 2e-4


@pytest.mark.parametrize("name", HYBRIDS[:2])
def test_a_hybrid_begins_anew_after_a_failed_step(loaded, name, monkeypatch):
    prompts = [tokens(40), tokens(9, 1)]
    config = EngineConfig(kv_dtype="fp32", max_model_len=96, prefill_chunk=16)
    want = [done.token_ids for done in LLM(loaded(name), config).generate(prompts, GREEDY)]
    llm, calls = LLM(loaded(name), config), []

    def failing(run):
        def step(*args):
            calls.append(run(*args))  # all states have changed
            if len(calls) in (2, 6):
                raise ZeroDivisionError
            return calls[-1]

        return step

    wrap_part(monkeypatch, llm, "run", failing)
    requests = [llm.add_request(prompt, GREEDY) for prompt in prompts]
    found = {request: [] for request in requests}
    while llm.has_work:
        try:
            for output in llm.step():
                found[output.request_id] += output.token_ids
        except ZeroDivisionError:
            continue
    assert calls[6:]
    assert [found[request] for request in requests] == want
    nothing_left(llm)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_begins_where_its_states_were_kept_and_gives_the_same_bits(loaded, name):
    """The states after a prompt's last full block are kept. A cold run ends a chunk there too."""
    config = EngineConfig(kv_dtype="fp32", max_model_len=256, max_num_seqs=2, prefix_tail_memory=2**20)
    prompt, params = tokens(70), replace(GREEDY, logprobs=0)

    def answer(llm: LLM, ids: list[int]) -> tuple[int, list[int], list]:
        [out] = llm.generate([ids], params)
        return out.cached_tokens, out.token_ids, out.logprobs

    llm = LLM(loaded(name), config)
    first = answer(llm, prompt)
    assert first[0] == 0
    assert answer(llm, prompt) == (64, *first[1:])
    longer = [*prompt, *first[1], *tokens(5, 2)]
    cached, *found = answer(llm, longer)
    assert cached == 64
    assert (0, *found) == answer(LLM(loaded(name), replace(config, prefill_chunk=64)), longer)
    assert answer(llm, [*longer[:40], *tokens(40, 3)])[0] == 0  # the states of its first block were not kept
    assert llm.stats().prefix.tails_used == 2
    nothing_left(llm)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_conversation_with_a_hybrid_goes_on_from_the_last_block_of_its_answer(loaded, name):
    """Decoding rounds otherwise than a prompt in chunks, so states are close to those of a cold run, not equal."""
    config = EngineConfig(kv_dtype="fp32", max_model_len=256, max_num_seqs=2, prefix_tail_memory=2**20)
    llm, prompt, params = LLM(loaded(name), config), tokens(70), replace(GREEDY, max_tokens=75, logprobs=0)
    [first] = llm.generate([prompt], params)
    longer = [*prompt, *first.token_ids, *tokens(5, 2)]
    [found] = llm.generate([longer], params)
    assert found.cached_tokens == 128
    [cold] = LLM(loaded(name), replace(config, prefix_cache=False, prefix_tail_memory=None)).generate([longer], params)
    assert found.token_ids == cold.token_ids
    assert [one.logprob for one in found.logprobs] == pytest.approx([one.logprob for one in cold.logprobs], abs=1e-3)
    kept = llm.stats().prefix.tails_kept
    assert len(manager(llm).slots.index) <= kept  # the boundaries of an answer before its last one are not kept
    nothing_left(llm)


def test_the_states_of_a_hybrid_are_said_and_counted(loaded):
    llm = LLM(loaded("qwen3_5_text"), EXACT)
    state = mib(llm.plan.state_bytes)
    assert f"{state} of states a sequence" in start_up_line(llm)
    assert any("layers have K/V" in note and state in note for note in llm.notes)
    llm.generate([tokens(20)], GREEDY)
    report = kv_report(llm)
    assert report["state_bytes"] == llm.plan.state_bytes
    assert report["bytes_held"] == report["state_bytes"] + sum(pool["bytes_held"] for pool in report["pools"])


def test_deterministic_mode_does_not_take_states(built, monkeypatch):
    forbid_reading_weights(monkeypatch)
    assert "--deterministic" in refusal(LLM, str(built("lfm2")), EngineConfig(deterministic=True))


def test_a_multimodal_checkpoint_serves_its_text_and_says_so(built, loaded, caplog):
    llm = LLM(loaded("gemma3"), EXACT)
    assert any("multimodal" in note and "no images" in note for note in llm.notes)
    assert not [record for record in caplog.records if "not used" in record.getMessage()]


def test_a_multimodal_checkpoint_without_a_tensor_of_its_text_is_refused(built, tmp_path):
    folder = shutil.copytree(built("gemma3"), tmp_path / "short")
    tensors = load_file(folder / "model.safetensors")
    [name] = [key for key in tensors if key.endswith("layers.1.mlp.up_proj.weight")]
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "layers.1.mlp.up_proj" in refusal(LLM, str(folder))


def test_multimodal_checkpoints_with_quantized_weights_are_refused(built, tmp_path, monkeypatch):
    forbid_reading_weights(monkeypatch)
    folder = shutil.copytree(built("gemma3"), tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    assert "quantized weights" in refusal(LLM, str(folder))


def test_a_step_does_not_look_for_packed_sequences(loaded, monkeypatch):
    """transformers would read the positions on the host, and a GPU's graph cannot be recorded then."""

    def read(*_: object) -> None:
        pytest.fail("the positions were read")

    llm = LLM(loaded("laguna"), EXACT)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", read)
    [done] = llm.generate([tokens(20)], GREEDY)
    assert len(done.token_ids) == 8


def test_frequencies_that_depend_on_the_length_are_the_modules_own(built, loaded):
    """phimoe keeps the short factors at every length, and scales by a factor of its own beyond the original length."""
    ids = tokens(150)  # the original length is 64
    want = wanted(built("phimoe+longrope"), ids)
    assert (logits(LLM(loaded("phimoe+longrope"), EXACT), ids) - want).abs().max() < max(1e-5, 1e-4 * want.std().item())
