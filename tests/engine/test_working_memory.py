"""The cache of a GPU gets what the largest steps leave. The steps are real, the GPU's memory is an account."""

from dataclasses import dataclass, field
from functools import partial

import census_models
import pytest
import torch
from fake_gpus import Card, install
from helpers import refusal

from lean import LLM, EngineConfig, SamplingParams
from lean.cache.plan import plan_cache
from lean.device import peak_bytes
from lean.engine import assemble, working_memory
from lean.engine.parts import bind
from lean.engine.working_memory import RESERVE, measure, prompt_chunks, working_bytes
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.quant import raw_format
from lean.report import start_up_line
from lean.store.source import resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIB = 2**20
ROW = 3 * MIB  # what a row of a step takes on the card


@pytest.fixture(scope="module")
def model(tiny) -> LoadedModel:
    source = resolve(str(tiny("llama", num_hidden_layers=2)))
    return load_model(inspect_model(source, EngineConfig(dtype="float32")), CPU)


@dataclass
class Steps:
    """Steps that ran: their query lengths, and the tokens that their block tables reach."""

    lengths: list[list[int]] = field(default_factory=list)
    reach: list[int] = field(default_factory=list)


@pytest.fixture
def card(monkeypatch, model):
    """A card on which a step takes ROW bytes for each of its rows while it runs, and 5 MiB for good at the first."""
    card, hidden = Card(total=24 * 2**30), model.hidden
    card.steps = Steps()

    def on_card(input_ids, position_ids, attention_batch, kv_cache):
        batch, nbytes = attention_batch, input_ids.shape[1] * ROW
        if not card.steps.lengths:
            card.used += 5 * MIB
        card.steps.lengths.append(batch.query_start_loc.diff().tolist())
        card.steps.reach.append(batch.block_tables[0].shape[1] * kv_cache.plan.block_size)
        card.allocate(nbytes)
        try:
            return hidden(input_ids, position_ids, attention_batch=batch, kv_cache=kv_cache)
        finally:
            card.free(nbytes)

    monkeypatch.setattr(model, "hidden", on_card)
    install(monkeypatch, card)
    return card


def measured(model: LoadedModel, recorded: int = 0, **options) -> int:
    config = EngineConfig(**options)
    plan = plan_cache(model.info.layers, config, raw_format(model.info.dtype))
    return measure(model, config, plan, "kernels", recorded, partial(peak_bytes, CUDA)).total


@pytest.mark.parametrize(
    ("options", "longest", "wanted"),
    [
        ({}, 512, [512]),
        ({"prefill_chunk": 128}, 128, [128] * 4),
        ({"prefill_chunk": 100, "max_num_batched_tokens": 250}, 100, [100, 100, 50]),
        ({"prefill_chunk": 100, "max_num_seqs": 2}, 100, [100, 100]),
        ({"prefill_chunk": 2000}, 300, [300] * 6 + [200]),
    ],
    ids=str,
)
def test_the_largest_step_of_prompts_is_what_the_scheduler_may_put_together(options, longest, wanted):
    assert prompt_chunks(EngineConfig(**options), longest) == wanted


def test_prompts_decode_steps_and_wide_tables_are_tried(model, card):
    measured(model, recorded=3, prefill_chunk=64, max_num_batched_tokens=160, max_num_seqs=5, max_model_len=400)
    first, *steps = card.steps.lengths
    assert first == [2]  # the test of all layers
    assert sorted(steps) == [[1] * 3, [1] * 5, [64, 64, 32]]
    assert set(card.steps.reach[1:]) == {416}


def test_the_largest_step_and_the_recorded_one_stay_free(model, card):
    assert measured(model, prefill_chunk=64, max_num_batched_tokens=100) == RESERVE + 100 * ROW
    assert measured(model, 8, prefill_chunk=64, max_num_batched_tokens=100) == RESERVE + (100 + 8) * ROW
    assert measured(model, prefill_chunk=4, max_num_batched_tokens=8) == RESERVE + 8 * ROW
    assert card.allocated == 0


def test_decode_steps_of_a_hybrid_are_tried_with_copies_of_all_states(tmp_path, monkeypatch):
    census_models.build("lfm2", tmp_path / "lfm2")
    model = load_model(inspect_model(resolve(str(tmp_path / "lfm2")), EngineConfig(dtype="float32")), CPU)
    hidden, groups = model.hidden, []

    def watched(*args, attention_batch, **kwargs):
        groups.append(attention_batch.states)
        return hidden(*args, attention_batch=attention_batch, **kwargs)

    monkeypatch.setattr(model, "hidden", watched)
    config = EngineConfig(max_num_seqs=5, prefill_chunk=16, max_num_batched_tokens=40)
    plan = plan_cache(model.info.layers, config, raw_format(model.info.dtype), model.info.states)
    measure(model, config, plan, "kernels", 0, lambda step: step() or 0)
    _self_test, prompts, [decode] = groups
    assert [group.fresh for group in prompts] == [True, True, True]
    assert (decode.num_seqs, decode.fresh, decode.slots.first) == (5, False, 1)


def test_memory_that_torch_keeps_from_earlier_is_not_taken_for_the_steps(model, card):
    card.allocate(1000 * ROW)
    card.free(1000 * ROW)
    assert measured(model, max_num_batched_tokens=512) == RESERVE + 512 * ROW


@pytest.mark.parametrize("options", [{"window": 64}, {"kv_dtype": "auto"}, {"deterministic": True}], ids=str)
def test_every_kind_of_cache_is_tried(model, card, options):
    assert measured(model, prefill_chunk=64, max_num_batched_tokens=100, **options) == RESERVE + 100 * ROW


@pytest.fixture
def on_gpu(monkeypatch, model):
    """``on_gpu(**options)``: `working_bytes` of the model, as if it were on the card."""
    monkeypatch.setattr(LoadedModel, "device", CUDA)
    monkeypatch.setattr(working_memory, "bind", lambda model, *rest: bind_on_cpu(monkeypatch, model, *rest))

    def call(**options) -> int:
        config = EngineConfig(**options)
        plan = plan_cache(model.info.layers, config, raw_format(model.info.dtype))
        return working_bytes(model, config, plan, "kernels", 0)

    return call


def bind_on_cpu(patch, *arguments):
    """The cache and the steps of the trial are on the CPU."""
    patch.setattr(LoadedModel, "device", CPU)
    return bind(*arguments)


def test_steps_that_do_not_fit_are_refused_with_what_to_lower(card, on_gpu):
    card.used = card.total - 512 * ROW + MIB
    message = refusal(on_gpu)
    assert message.startswith("steps of 512 tokens do not fit into the 1,535.0 MiB that are free beside the weights")
    assert "--max-num-batched-tokens" in message


def test_what_the_steps_took_is_given_back(card, on_gpu):
    assert on_gpu(prefill_chunk=256) == RESERVE + 512 * ROW
    assert card.reserved == 0


def test_an_error_of_the_model_is_no_lack_of_memory(card, on_gpu, monkeypatch):
    def fail(*args):
        raise RuntimeError("a kernel is broken")

    monkeypatch.setattr(working_memory, "try_layers", fail)
    with pytest.raises(RuntimeError, match="a kernel is broken"):
        on_gpu()


def test_a_cpu_gives_memory_as_it_is_needed(model):
    config = EngineConfig()
    plan = plan_cache(model.info.layers, config, raw_format(model.info.dtype))
    assert working_bytes(model, config, plan, "kernels", 0) == 0


def test_the_cache_gets_its_share_of_what_steps_leave(model, monkeypatch):
    monkeypatch.setattr(assemble, "free_bytes", lambda device: 400 * MIB)
    monkeypatch.setattr(assemble, "cache_share", lambda device: 0.9)
    monkeypatch.setattr(assemble, "working_bytes", lambda *_: 390 * MIB)
    llm = LLM(model, EngineConfig(max_num_seqs=256, kv_residual_length=0))
    assert 8.9 * MIB < llm.size.nbytes <= 9 * MIB
    assert llm.engine.parts.working_bytes == 390 * MIB
    assert "MiB allocated, 390.0 MiB kept for steps, room for " in start_up_line(llm)
    assert llm.generate("hi", SamplingParams(max_tokens=2))[0].token_ids
    message = refusal(LLM, model, EngineConfig(kv_memory=11 * MIB, kv_residual_length=0))
    assert "exceeds the 10.0 MiB of free memory, beside 390.0 MiB for steps; what fits: " in message
