"""Products of a single row: when they bypass oneDNN, and that oneDNN is on again afterwards in every case."""

import threading
import time

import pytest
import torch
from engine_state import runner
from tiny import tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.engine.onednn import favours_single_row, onednn_as_it_is, single_row_products

CPU = torch.device("cpu")
needs_x86 = pytest.mark.skipif(
    not favours_single_row(torch.nn.Linear(1, 1), torch.bfloat16, CPU), reason="not on this machine"
)


def is_on() -> bool:
    return torch.backends.mkldnn.enabled


@pytest.fixture(autouse=True)
def _on_before_and_after():
    assert is_on()
    yield
    assert is_on()


def seen_by(module: torch.nn.Module, run) -> list[tuple[int, bool]]:
    """(rows, whether oneDNN was on) of every call of a module while ``run`` runs."""
    seen: list[tuple[int, bool]] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append((args[0].shape[-2], is_on())))
    run()
    handle.remove()
    return seen


def steps_of(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, bool]]:
    """`seen_by` of the first projection, while four tokens are generated for every prompt."""
    projection = next(part for name, part in llm.model.module.named_modules() if name.endswith("q_proj"))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    return seen_by(projection, lambda: llm.generate(prompts, params))


@needs_x86
def test_only_steps_of_one_row_leave_onednn(tiny):
    llm = LLM(str(tiny("llama", num_hidden_layers=2)), EngineConfig(dtype="bfloat16"))
    assert steps_of(llm, [tokens(9)]) == [(9, True)] + [(1, False)] * 3
    assert steps_of(llm, [tokens(9), tokens(5, seed=1)]) == [(14, True)] + [(2, True)] * 3


@needs_x86
def test_compiled_steps_of_one_row_leave_onednn_too(tiny, home):
    llm = LLM(str(tiny("llama", num_hidden_layers=2)), EngineConfig(dtype="bfloat16", max_num_seqs=2))
    seen = []

    def backend(graph, inputs):
        def call(*args):
            seen.append(is_on())
            return graph.forward(*args)

        return call

    runner(llm).prepare_decode(2, llm.size.max_model_len, backend, None)
    for prompts, on in (([tokens(9)], False), ([tokens(9), tokens(5, seed=1)], True)):
        seen.clear()
        llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        assert seen == [on] * 3 * 2  # layers


@needs_x86
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"dtype": "float32"}),
        ("llama", {"dtype": "bfloat16", "deterministic": True}),
        ("gpt_oss", {"dtype": "bfloat16"}),  # its experts are no linear layers: they would take 12 times as long
    ],
)
def test_other_dtypes_and_weights_and_deterministic_mode_keep_onednn(tiny, kind, options):
    llm = LLM(str(tiny(kind, num_hidden_layers=2)), EngineConfig(**options))
    assert steps_of(llm, [tokens(9)]) == [(9, True)] + [(1, True)] * 3


@needs_x86
def test_the_head_of_one_row_leaves_onednn_and_is_as_near_to_the_exact_logits(tiny):
    llm = LLM(str(tiny("llama", num_hidden_layers=2)), EngineConfig(kv_dtype="bf16", dtype="bfloat16"))
    [(_, hidden)] = llm.hidden_states(tokens(5))
    head = llm.model.module.get_output_embeddings()
    assert seen_by(head, lambda: [llm.logits(hidden[-1:]), llm.logits(hidden)]) == [(1, False), (5, True)]
    exact = hidden[-1:].double() @ head.weight.double().T
    rounding = 2**-8 * exact.abs().max()
    for logits in (llm.logits(hidden[-1:]), llm.logits(hidden)[-1:]):
        assert (logits - exact).abs().max() <= rounding


def test_an_error_turns_onednn_on_again():
    def fail() -> None:
        with single_row_products():
            assert not is_on()
            raise RuntimeError("of a model")

    with pytest.raises(RuntimeError, match="of a model"):
        fail()


@pytest.mark.parametrize("first_out", ["first in", "last in"])
def test_two_threads_turn_onednn_on_again_in_either_order(first_out):
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with single_row_products():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with single_row_products():
        if first_out == "first in":
            leave.set()
            thread.join()
            assert not is_on()  # this one is not done
    if first_out == "last in":
        assert not is_on()  # the other is not done
        leave.set()
        thread.join()


def test_a_deterministic_step_never_sees_onednn_off():
    with onednn_as_it_is(), single_row_products():
        assert is_on()
    held = threading.Event()

    def deterministic() -> None:
        with onednn_as_it_is():
            assert is_on()
            held.set()

    thread = threading.Thread(target=deterministic)
    with single_row_products():
        thread.start()
        time.sleep(0.05)
        assert not held.is_set()
    thread.join(10)
    assert held.is_set()


def test_frozen_flags_are_left_alone(monkeypatch):
    monkeypatch.setattr(torch.backends, "flags_frozen", lambda: True)
    with single_row_products():
        assert is_on()


def test_a_caller_that_turned_onednn_off_finds_it_off():
    torch.backends.mkldnn.enabled = False
    try:
        with single_row_products():
            assert not is_on()
        assert not is_on()
    finally:
        torch.backends.mkldnn.enabled = True
