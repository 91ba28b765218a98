"""Products of a single row: when they leave oneDNN, and that oneDNN is back whatever happens."""

import threading

import pytest
import torch
from tiny import tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.products import favours_single_row, single_row_products

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


def steps_of(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, bool]]:
    """(rows, whether oneDNN was on) of every call of the model's first projection."""
    seen: list[tuple[int, bool]] = []
    projection = next(part for name, part in llm.model.module.named_modules() if name.endswith("q_proj"))
    handle = projection.register_forward_pre_hook(lambda _, args: seen.append((args[0].shape[-2], is_on())))
    llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    handle.remove()
    return seen


@needs_x86
def test_only_steps_of_one_row_leave_onednn(tiny):
    llm = LLM(str(tiny("llama", num_hidden_layers=2)), EngineConfig(dtype="bfloat16"))
    assert steps_of(llm, [tokens(9)]) == [(9, True)] + [(1, False)] * 3
    assert steps_of(llm, [tokens(9), tokens(5, seed=1)]) == [(14, True)] + [(2, True)] * 3


@needs_x86
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16", "deterministic": True}], ids=str)
def test_other_dtypes_and_deterministic_mode_never_do(tiny, options):
    llm = LLM(str(tiny("llama", num_hidden_layers=2)), EngineConfig(**options))
    assert all(on for _, on in steps_of(llm, [tokens(9)]))


@needs_x86
def test_weights_that_are_no_linear_layers_keep_a_model_with_onednn(tiny):
    """gpt-oss's experts lie the other way round: torch's own kernel takes 12 times as long for them."""
    llm = LLM(str(tiny("gpt_oss", num_hidden_layers=2)), EngineConfig(dtype="bfloat16"))
    assert all(on for _, on in steps_of(llm, [tokens(9)]))


@needs_x86
def test_logits_are_as_near_to_the_exact_ones_as_onednn_makes_them(tiny):
    llm = LLM(str(tiny("llama", num_hidden_layers=2)), EngineConfig(kv_dtype="bf16", dtype="bfloat16"))
    [(_, hidden)] = llm.hidden_states(tokens(5))
    row = hidden[-1:]
    exact = row.double() @ llm.model.module.get_output_embeddings().weight.double().T
    alone, among = llm.logits(row), llm.logits(hidden)[-1:]  # one row, five rows
    rounding = 2**-8 * exact.abs().max()
    assert (alone - exact).abs().max() <= rounding
    assert (among - exact).abs().max() <= rounding


def test_an_error_puts_it_back():
    def fail() -> None:
        with single_row_products():
            assert not is_on()
            raise RuntimeError("of a model")

    with pytest.raises(RuntimeError, match="of a model"):
        fail()


def test_two_threads_put_it_back_in_any_order():
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with single_row_products():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with single_row_products():
        pass
    assert not is_on()  # the other is not done
    leave.set()
    thread.join()


def test_who_turned_it_off_finds_it_off():
    torch.backends.mkldnn.enabled = False
    try:
        with single_row_products():
            assert not is_on()
        assert not is_on()
    finally:
        torch.backends.mkldnn.enabled = True
