"""The bytes of memory that no row may see change no result."""

import pytest
import torch
from attention_oracle import (
    FILLS,
    KV_DTYPES,
    RULES,
    Heads,
    PagedCache,
    Rule,
    Tokens,
    error,
    expected,
    filled,
    same_bits,
)

HEADS = Heads(4, 2, 24, 24)
EXACT = torch.float32
LENGTHS = (1, 15, 16, 17, 31, 33, 257)
POISONS = [name for name in FILLS if name != "zeros"]
SEQUENCES = [Tokens.random(length, HEADS, seed=length) for length in LENGTHS]


def ragged_rows(kv_dtype: str, rule: Rule, fill: str) -> list[torch.Tensor]:
    """A prefill of every length in one batch, then the last row of each again, as decode computes it."""
    cache = PagedCache(HEADS, kv_dtype, LENGTHS, exact_dtype=EXACT, fill=fill)
    rows = cache.step([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(SEQUENCES)], rule)
    return rows + cache.attend([(s, tokens, len(tokens) - 1, len(tokens)) for s, tokens in enumerate(SEQUENCES)], rule)


@pytest.mark.parametrize("rule", ["full", "window, sinks", "everything"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_poisoned_arena_gives_the_bits_of_a_zeroed_one(kv_dtype: str, rule: str) -> None:
    """The null block is poisoned like all others; tables are padded with it."""
    zeroed = ragged_rows(kv_dtype, RULES[rule], "zeros")
    for poison in POISONS:
        for length, wanted, rows in zip(LENGTHS * 2, zeroed, ragged_rows(kv_dtype, RULES[rule], poison)):
            assert same_bits(wanted, rows), f"length {length}, {poison}"


@pytest.mark.parametrize("chunk", [1, 40])
@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.window or rule.residual_length], ids=str)
@pytest.mark.parametrize("kv_dtype", ["bf16", "k8v4", "fp8"])
def test_evicted_blocks_are_never_read(kv_dtype: str, rule: Rule, chunk: int) -> None:
    """Blocks are given up as soon as the rule allows, their bytes become NaN and their table entries the null block."""
    tokens = Tokens.random(270, HEADS)
    kept, evicted = (PagedCache(HEADS, kv_dtype, [270], exact_dtype=EXACT, block_size=8) for _ in range(2))
    start = 0 if chunk > 1 else 250
    for cache in (kept, evicted):
        cache.write([(0, tokens, 0, start)])
    wanted = kept.run(tokens, rule, chunk, start=start)
    assert same_bits(evicted.run(tokens, rule, chunk, start=start, evict=True), wanted)
    assert error(wanted, expected(tokens, kv_dtype, rule, start)) < 4e-6
    # The blocks that stay are bounded by the rule, not by the length.
    for tables, reach, sinks in zip(
        evicted.tables, (rule.window, rule.residual_length), (rule.num_sink_tokens, rule.num_exact_sinks)
    ):
        assert not reach or tables.count_nonzero() <= -(-(reach + chunk) // 8) + 1 + -(-sinks // 8)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8", "int4", "k6v4"])
@pytest.mark.parametrize("rule", ["full", "everything"])
def test_a_neighbour_full_of_nan_changes_nothing(kv_dtype: str, rule: str) -> None:
    tokens, other = (Tokens.random(count, HEADS, seed=count) for count in (100, 90))
    nan = Tokens(other.query, other.query_sink, other.key * torch.nan, other.value * torch.nan)
    rows = []
    for neighbour in (other, nan):
        cache = PagedCache(HEADS, kv_dtype, [100, 90], exact_dtype=EXACT)
        rows.append(cache.step([(1, neighbour, 0, 90), (0, tokens, 0, 100)], RULES[rule]))
    assert same_bits(rows[0][1], rows[1][1])
    assert rows[1][0].isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8", "int4"])
def test_a_non_finite_token_is_seen_by_the_rows_that_see_it_and_by_no_earlier_chunk(
    kv_dtype: str, what: str, bad: float
) -> None:
    tokens = Tokens.random(60, HEADS)
    spoilt = getattr(tokens, what).clone()
    spoilt[40, 1, 3] = bad
    spoilt = Tokens(**{**vars(tokens), what: spoilt})
    cache = PagedCache(HEADS, kv_dtype, [60], exact_dtype=EXACT)
    rows = cache.run(spoilt, Rule(window=16), 40)
    assert same_bits(rows[:40], PagedCache(HEADS, kv_dtype, [60]).run(tokens, Rule(window=16), 40)[:40])
    group = slice(2, 4)  # query heads of KV head 1
    assert not rows[40:56, group].isfinite().all(-1).any() or (kv_dtype == "fp32" and what == "key")
    assert rows[40:, :2].isfinite().all()


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8", "int4"])
@pytest.mark.parametrize("rule", ["full", "everything"])
def test_padding_rows_of_a_step_may_hold_nan(kv_dtype: str, rule: str) -> None:
    tokens = Tokens.random(50, HEADS)
    cache = PagedCache(HEADS, kv_dtype, [50], exact_dtype=EXACT)
    cache.write([(0, tokens, 0, 50)])
    padding = torch.full((3, 4, 24), torch.nan)
    rows = cache.attend_packed(
        torch.cat((tokens.query, padding)), torch.cat((tokens.query_sink, padding)), [0], [50], [50], RULES[rule]
    )
    assert same_bits(rows[:50], cache.attend([(0, tokens, 0, 50)], RULES[rule])[0])
    assert not rows[50:].any()


def test_poisoned_memory_spoils_rows_that_read_it() -> None:
    """Else the tests above would hold for code that reads everything."""
    for poison in POISONS:
        assert filled((1, 48), poison).view(torch.float16).isnan().all()
    assert filled((1, 48), "0x7f").view(torch.float8_e4m3fn).float().isnan().all()
    assert filled((1, 48), "0xff").view(torch.bfloat16).isnan().all()
    assert filled((1, 48), "0xff").view(torch.float64).isnan().all()
    cache = PagedCache(HEADS, "int8", [20])
    (rows,) = cache.attend([(0, Tokens.random(20, HEADS), 0, 20)], Rule())
    assert rows.isnan().all()
