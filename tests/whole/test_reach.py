"""A row depends on the keys its rule names and on no other: the window keeps exactly W keys, itself included."""

import pytest
import torch
from attention_oracle import Heads, PagedCache, Rule, Tokens, error, expected, same_bits

from lean.kernels.layout import first_in_window, sink_shift

HEADS = Heads(2, 1, 16, 16)
COUNT = 180
TOKENS = Tokens.random(COUNT, HEADS)
OTHERS = Tokens.random(COUNT, HEADS, seed=1)
EXACT = torch.float32


class Probe:
    """The last row of a sequence, in prefill and in decode, with single keys of the cache flipped."""

    def __init__(self, kv_dtype: str, rule: Rule) -> None:
        self.cache = PagedCache(HEADS, kv_dtype, [COUNT], exact_dtype=EXACT)
        self.cache.write([(0, TOKENS, 0, COUNT)])
        self.rule = rule
        self.plain = self.rows()

    def rows(self) -> list[torch.Tensor]:
        chunks = (COUNT - 1, COUNT - 40)
        return [self.cache.attend([(0, TOKENS, first, COUNT)], self.rule)[0][-1] for first in chunks]

    def depends_on(self, j: int, pools: slice = slice(None)) -> bool:
        """Whether the last row changes with token j, in prefill and in decode alike."""
        everything = self.cache.pools
        self.cache.pools = everything[pools]
        self.cache.tables, tables = self.cache.tables[pools], self.cache.tables
        self.cache.write([(0, OTHERS, j, j + 1)])
        self.cache.pools, self.cache.tables = everything, tables
        changed = {not same_bits(new, old) for new, old in zip(self.rows(), self.plain)}
        self.cache.write([(0, TOKENS, j, j + 1)])
        assert len(changed) == 1, "prefill and decode disagree"
        return changed.pop()


@pytest.mark.parametrize("residual_length", [0, 1, 32, 64])
@pytest.mark.parametrize("num_sink_tokens", [0, 1, 4, 40])
@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 100])
def test_distance_w_minus_1_matters_and_distance_w_does_not(
    window: int, num_sink_tokens: int, residual_length: int
) -> None:
    """With sinks, the first S tokens matter as well."""
    num_exact_sinks = num_sink_tokens if residual_length else 0
    probe = Probe("int4", Rule(window, num_sink_tokens, residual_length, num_exact_sinks))
    last = COUNT - 1
    assert probe.depends_on(last - (window - 1))
    assert not probe.depends_on(last - window)
    assert probe.depends_on(last)
    if num_sink_tokens:
        assert probe.depends_on(0)
        assert probe.depends_on(num_sink_tokens - 1)
    assert not probe.depends_on(num_sink_tokens)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "k8v4", "k=int5,v=int3"])
@pytest.mark.parametrize("window", [0, 33])
def test_every_format_reaches_equally_far(kv_dtype: str, window: int) -> None:
    probe = Probe(kv_dtype, Rule(window))
    for j in (*range(4), *range(COUNT - 40, COUNT)):
        assert probe.depends_on(j) == (not window or j >= COUNT - window), f"token {j}"


@pytest.mark.parametrize(
    "rule", [Rule(0, 0, 32, 4), Rule(0, 0, 1, 0), Rule(100, 4, 32, 4), Rule(20, 4, 32, 4)], ids=str
)
def test_the_residual_is_read_exact_and_only_exact(rule: Rule) -> None:
    """Keys with i - j < R or j < S depend on the exact pool alone, the other visible ones on the quantized alone."""
    probe = Probe("int8", rule)
    quantized, exact = slice(0, 1), slice(1, 2)
    for j in (0, 3, 4, 40, COUNT - 101, COUNT - 100, COUNT - 33, COUNT - 32, COUNT - 2, COUNT - 1):
        distance = COUNT - 1 - j
        visible = not rule.window or distance < rule.window or j < rule.num_sink_tokens
        is_exact = distance < rule.residual_length or j < rule.num_exact_sinks
        assert probe.depends_on(j, exact) == (visible and is_exact), f"exact copy of token {j}"
        assert probe.depends_on(j, quantized) == (visible and not is_exact), f"quantized copy of token {j}"


def test_a_sliding_layer_forgets_its_exact_sinks_with_its_window() -> None:
    probe = Probe("int8", Rule(window=32, residual_length=8, num_exact_sinks=COUNT - 20))
    assert not probe.depends_on(3)
    assert probe.depends_on(COUNT - 25, slice(1, 2))
    assert not probe.depends_on(COUNT - 25, slice(0, 1))
    assert probe.depends_on(COUNT - 15, slice(0, 1))


@pytest.mark.parametrize("window", [1, 2, 31, 100])
@pytest.mark.parametrize("num_sink_tokens", [0, 1, 4, 40])
def test_the_layout_names_the_first_key_and_the_shift_of_the_rule(window: int, num_sink_tokens: int) -> None:
    for position in (0, window - 1, window, window + num_sink_tokens, 1000, 5_000_000):
        first = first_in_window(position, window)
        assert first == max(0, position - (window - 1))
        shift = sink_shift(position, window, num_sink_tokens)
        if num_sink_tokens and first > num_sink_tokens:
            # The last sink stands right behind the window: one further away than the window's first key.
            assert position - shift - (num_sink_tokens - 1) == position - first + 1
        else:
            assert shift == 0
    assert first_in_window(1000, 0) == sink_shift(1000, 0, 4) == 0


def test_sink_keys_meet_the_turned_query_and_other_keys_the_plain_one() -> None:
    rule = Rule(window=32, num_sink_tokens=4)
    cache = PagedCache(HEADS, "fp32", [COUNT])
    cache.write([(0, TOKENS, 0, COUNT)])
    for name, sinks_count in (("query_sink", True), ("query", False)):
        other = Tokens(**{**vars(TOKENS), name: getattr(OTHERS, name)})
        (rows,) = cache.attend([(0, other, 0, COUNT)], rule)
        assert error(rows, expected(other, "fp32", rule)) < 4e-6
        (plain,) = cache.attend([(0, other, 0, COUNT)], Rule(window=32))
        assert same_bits(plain, cache.attend([(0, TOKENS, 0, COUNT)], Rule(window=32))[0]) == sinks_count


@pytest.mark.parametrize("num_sink_tokens", [0, 3])
@pytest.mark.parametrize("window", [1, 16, 31, 33])
def test_prefill_and_decode_keep_the_same_window_around_its_length(window: int, num_sink_tokens: int) -> None:
    rule = Rule(window, num_sink_tokens)
    for count in range(max(window - 1, 1), window + num_sink_tokens + 3):
        tokens = Tokens.random(count, HEADS)
        prefill, decode = (PagedCache(HEADS, "bf16", [count]).run(tokens, rule, chunk) for chunk in (count, 1))
        assert same_bits(prefill, decode)
        assert error(prefill, expected(tokens, "bf16", rule)) < 4e-6


@pytest.mark.parametrize("sizes", [(512, 128, 128), (384, 128, 128), (300, 128, 128), (128, 128, 32)], ids=str)
@pytest.mark.parametrize("decoded", [0, 3])
def test_a_prompt_longer_than_the_window_equals_a_band_mask(sizes: tuple[int, int, int], decoded: int) -> None:
    """``sizes``: prompt, window and chunk. Blocks behind the window are evicted."""
    prompt, window, chunk = sizes
    tokens = Tokens.random(prompt + decoded, HEADS)
    cache = PagedCache(HEADS, "fp32", [len(tokens)])
    prefilled = Tokens(*(x[:prompt] for x in vars(tokens).values()))
    rows = cache.run(prefilled, Rule(window), chunk, evict=True)
    if decoded:
        rows = torch.cat((rows, cache.run(tokens, Rule(window), 1, start=prompt, evict=True)))
    assert error(rows, expected(tokens, "fp32", Rule(window))) < 4e-6
