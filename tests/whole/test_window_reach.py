"""A user's window reaches over exactly W keys and S sinks in a whole model.

How far each rule reaches inside the attention op is in test_reach.py, and what it computes in test_streaming.py.
"""

import pytest
import torch
from tiny import WINDOW as OWN_WINDOW
from windowed import IDS, LAST, LENGTH, QUANTIZED, hidden, loader, residual, same, start

from lean.model.load import LoadedModel

WINDOWS, ALL_SINKS, RESIDUALS = (1, 2, 31, 32, 33, 100), (0, 1, 4, 40), (0, 1, 32, 64)
EVERY = [
    (window, sinks, RESIDUALS[(w + s) % 4], QUANTIZED[(w + 2 * s + w // 4) % 4])
    for w, window in enumerate(WINDOWS)
    for s, sinks in enumerate(ALL_SINKS)
]
SOME = [(1, 40, 0, "int8"), (33, 4, 32, "k8v4"), (100, 1, 1, "fp8")]
REACH = [("llama", *rule) for rule in EVERY]
REACH += [(name, *rule) for name in ("qwen2", "phi3, half of the dims", "gemma2", "gemma3", "gpt_oss") for rule in SOME]
REACH += [("mistral", 1, 40, 0, "int8"), ("mistral", 100, 4, 8, "int8")]


@pytest.fixture(scope="module")
def model(tiny):
    return loader(tiny)


class Probe:
    """The last row of a prompt, in one chunk longer than the window and as a decode step behind evicted blocks."""

    def __init__(self, model: LoadedModel, kv_dtype: str, **config: object) -> None:
        chunks = (512, LAST // 4)  # 181 = 4 x 45 + 1
        self.engines = [start(model, kv_dtype, prefill_chunk=chunk, block_size=16, **config) for chunk in chunks]
        self.plain = self.rows(IDS)

    def rows(self, ids: list[int]) -> list[torch.Tensor]:
        return [hidden(llm, ids)[-1] for llm in self.engines]

    def changed(self, flipped: set[int], by: int = 1) -> bool:
        """Whether the last row changes with these tokens, in prefill and in decode alike."""
        ids = [3 + (token - 3 + by) % 256 if j in flipped else token for j, token in enumerate(IDS)]
        found = {not same(row, plain) for row, plain in zip(self.rows(ids), self.plain)}
        assert len(found) == 1, "prefill and decode disagree"
        return found.pop()

    def depends_on(self, j: int) -> bool:
        """One other token may change too little to flip a bit, so several are tried."""
        return any(self.changed({j}, by) for by in (1, 77, 130, 200))

    def reaches_exactly(self, visible: set[int], each: set[int]) -> None:
        assert not self.changed(set(range(LENGTH)) - visible), "tokens that nobody may see matter"
        for j in each & visible:
            assert self.depends_on(j), f"token {j} does not matter"
        for j in each - visible:
            assert not self.changed({j}), f"token {j} matters"


def edges(window: int, sinks: int) -> set[int]:
    found = {0, sinks - 1, sinks, LAST - window, LAST - window + 1, LAST}
    return {j for j in found if 0 <= j <= LAST}


@pytest.mark.parametrize(("name", "window", "sinks", "length", "kv_dtype"), REACH)
def test_the_last_row_depends_on_the_window_and_the_sinks_and_on_nothing_else(
    model, name, window, sinks, length, kv_dtype
):
    """A token at distance W - 1 matters and one at distance W does not. Mistral keeps its sliding window."""
    if name == "mistral":
        seen, first = OWN_WINDOW, 0
    else:
        seen, first = window, sinks
    probe = Probe(model(name), kv_dtype, window=window, sinks=sinks, **residual(kv_dtype, length))
    visible = {j for j in range(LENGTH) if LAST - j < seen or j < first}
    probe.reaches_exactly(visible, edges(seen, first))


@pytest.mark.parametrize(("kv_dtype", "length"), [("int4", 8), ("fp8", 0)])
def test_every_single_visible_token_matters(model, kv_dtype, length):
    probe = Probe(model("llama"), kv_dtype, window=20, sinks=3, **residual(kv_dtype, length))
    visible = {*range(3), *range(LAST - 19, LENGTH)}
    probe.reaches_exactly(visible, visible | {3, 4, LAST - 20, LAST - 21, 90})


@pytest.mark.parametrize("name", ["gemma3, mixed", "gpt_oss, mixed"])
@pytest.mark.parametrize(("window", "sinks", "length", "kv_dtype"), [(40, 4, 0, "int8"), (70, 1, 8, "k8v4")])
def test_mixed_layers_reach_as_far_as_their_windows_together(model, name, window, sinks, length, kv_dtype):
    """Sliding below, the user's window above: what the upper layer sees, and the 31 tokens before each of these."""
    probe = Probe(model(name), kv_dtype, window=window, sinks=sinks, **residual(kv_dtype, length))
    first = LAST - (window - 1) - (OWN_WINDOW - 1)
    visible = {j for j in range(LENGTH) if j >= first or j < sinks}
    probe.reaches_exactly(visible, {0, sinks - 1, sinks, first - 1, LAST})
    assert probe.depends_on(first) or probe.depends_on(first + 1)  # it acts through one key of each layer


def test_a_users_window_changes_nothing_in_a_layer_with_a_sliding_window(model):
    plain = hidden(start(model("mistral"), "k8v4", kv_residual_length=8), IDS)
    for window in (5, 100):
        assert same(hidden(start(model("mistral"), "k8v4", kv_residual_length=8, window=window), IDS), plain)


@pytest.mark.parametrize("name", ["llama, 2 layers", "gemma3, mixed"])
@pytest.mark.parametrize("kv_dtype", ["fp32", "k8v4"])
def test_a_window_changes_nothing_while_every_token_is_visible(model, name, kv_dtype):
    """At a length of window + sinks the last row still sees every token at its true distance, one token later not.

    Sinks are added in another order, so the bits are equal only without sinks.
    """
    rest, ids = residual(kv_dtype, 8), IDS[:74]
    plain = hidden(start(model(name), kv_dtype, sinks=0, **rest), ids)
    assert same(hidden(start(model(name), kv_dtype, window=74, sinks=0, **rest), ids), plain)
    exact = hidden(start(model(name)), ids)
    assert (hidden(start(model(name), window=70, sinks=4), ids) - exact).abs().max() < 2e-5
    moved = (hidden(start(model(name), window=69, sinks=4), ids) - exact).abs().amax(1)
    assert moved[:73].max() < 2e-5
    assert moved[73] > 1e-4
