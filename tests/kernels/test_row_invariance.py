"""The bits of a row do not depend on the chunk, the batch, the block size or the number of threads."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_oracle import KV_DTYPES, RULES, Heads, PagedCache, Rule, Tokens, same_bits

EXACT = torch.float32
COUNT = 280  # more than one tile of keys and more than two of queries
TOKENS = Tokens.random(COUNT, Heads())
EVERY_FORMAT_AND_RULE = [(kv_dtype, rule) for kv_dtype in KV_DTYPES for rule in ("full", "everything")]
EVERY_FORMAT_AND_RULE += [("k8v4", rule) for rule in RULES if rule not in ("full", "everything")]
every_format_and_rule = pytest.mark.parametrize(
    ("kv_dtype", "rule"), [pytest.param(f, RULES[r], id=f"{f}-{r}") for f, r in EVERY_FORMAT_AND_RULE]
)


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def one_shot(kv_dtype: str, rule: Rule, tokens: Tokens = TOKENS) -> torch.Tensor:
    return PagedCache(Heads(), kv_dtype, [len(tokens)], exact_dtype=EXACT).run(tokens, rule, len(tokens))


@every_format_and_rule
def test_chunks_of_any_size_give_the_bits_of_one_shot(kv_dtype: str, rule: Rule) -> None:
    wanted = one_shot(kv_dtype, rule)
    for chunk, first in ((33, 0), (128, 0), (31, 120), (16, 200), (7, 240)):
        cache = PagedCache(Heads(), kv_dtype, [COUNT], exact_dtype=EXACT, seed=chunk)
        cache.write([(0, TOKENS, 0, first)])
        assert same_bits(cache.run(TOKENS, rule, chunk, start=first), wanted[first:]), f"chunk {chunk}"


@every_format_and_rule
def test_decoding_token_by_token_gives_the_bits_of_one_shot(kv_dtype: str, rule: Rule) -> None:
    wanted = one_shot(kv_dtype, rule)
    cache = PagedCache(Heads(), kv_dtype, [COUNT], exact_dtype=EXACT)
    for first, count in ((0, 18), (126, 4), (252, 20)):
        cache.write([(0, TOKENS, 0, first)])
        rows = [cache.step([(0, TOKENS, i, i + 1)], rule)[0] for i in range(first, first + count)]
        assert same_bits(torch.cat(rows), wanted[first : first + count])


@every_format_and_rule
def test_a_sequence_in_any_ragged_batch_gives_the_bits_of_the_sequence_alone(kv_dtype: str, rule: Rule) -> None:
    lengths = (270, 1, 45, 100)
    sequences = [Tokens.random(n, Heads(), seed=n) for n in lengths]
    alone = [one_shot(kv_dtype, rule, tokens) for tokens in sequences]
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0)):
        cache = PagedCache(Heads(), kv_dtype, lengths, exact_dtype=EXACT)
        contexts = {0: 200, 1: 0, 2: 44, 3: 0}
        cache.write([(s, sequences[s], 0, contexts[s]) for s in order])
        rows = cache.step([(s, sequences[s], contexts[s], lengths[s]) for s in order], rule)
        for s, own in zip(order, rows):
            assert same_bits(own, alone[s][contexts[s] :]), f"sequence {s} in order {order}"


# Both sides of every boundary: row tiles, key tiles, windows; in no order. Decode takes them in several batches.
RAGGED = (270, 1, 45, 600, 17, 256, 2, 257, 100, 513, 255, 64, 300, 91, 16, 128)
MANY = [Tokens.random(n, Heads(), seed=n) for n in RAGGED]
BATCHES = (range(2), range(3, 8), range(16), (3, 1), (15, 9, 4, 1, 6))


def in_float64(tokens: Tokens) -> Tokens:
    return Tokens(*(x.double() for x in vars(tokens).values()))


def compare_last_rows(
    kv_dtype: str, rule: Rule, sequences: list[Tokens], sink_logits: torch.Tensor | None = None
) -> None:
    """Compare the last 1, 2 and 5 rows of batches of sequences with those of a prefill of each alone."""
    cache = PagedCache(Heads(), kv_dtype, RAGGED, exact_dtype=sequences[0].key.dtype)
    cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
    parts = [(s, tokens, max(0, len(tokens) - 20), len(tokens)) for s, tokens in enumerate(sequences)]
    alone = [cache.attend([part], rule, sink_logits)[0] for part in parts]
    for batch, count in itertools.product(BATCHES, ((1,), (2, 1), (5, 1, 1, 2))):
        lengths = [min(RAGGED[s], n) for s, n in zip(batch, itertools.cycle(count))]
        rows = cache.attend(
            [(s, sequences[s], RAGGED[s] - n, RAGGED[s]) for s, n in zip(batch, lengths)], rule, sink_logits
        )
        for s, n, own in zip(batch, lengths, rows):
            assert same_bits(own, alone[s][-n:]), f"sequence {s} of {list(batch)}, {n} rows"


@every_format_and_rule
def test_decode_rows_of_2_5_and_16_ragged_sequences_have_the_bits_of_each_alone(kv_dtype: str, rule: Rule) -> None:
    compare_last_rows(kv_dtype, rule, MANY)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("kv_dtype", ["bf16", "k8v4"])
def test_decode_batches_with_sink_logits_have_the_bits_of_each_alone(kv_dtype: str, rule: Rule) -> None:
    compare_last_rows(kv_dtype, rule, MANY, torch.linspace(-2, 3, 6))


@pytest.mark.parametrize("rule", ["full", "everything"])
@pytest.mark.parametrize("kv_dtype", ["fp64", "int8", "fp8", "int4"])
def test_decode_batches_in_float64_have_the_bits_of_each_alone(kv_dtype: str, rule: str) -> None:
    compare_last_rows(kv_dtype, RULES[rule], [in_float64(tokens) for tokens in MANY], torch.linspace(-2, 3, 6).double())


@pytest.mark.parametrize("rule", ["full", "everything"])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8", "int4"])
def test_a_decode_row_is_unchanged_beside_a_sequence_full_of_nan(kv_dtype: str, rule: str) -> None:
    wanted: list[torch.Tensor] = []
    for spoilt in (None, 0, 3, 8):
        cache = PagedCache(Heads(), kv_dtype, RAGGED, exact_dtype=EXACT)
        sequences = [
            Tokens(*(x * (torch.nan if s == spoilt else 1) for x in vars(t).values())) for s, t in enumerate(MANY)
        ]
        cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
        rows = cache.attend(
            [(s, tokens, len(tokens) - 1, len(tokens)) for s, tokens in enumerate(sequences)], RULES[rule]
        )
        wanted = wanted or rows
        for s, (own, want) in enumerate(zip(rows, wanted)):
            assert own.isnan().all() if s == spoilt else same_bits(own, want), f"sequence {s} beside NaN in {spoilt}"


@pytest.mark.parametrize("heads", [Heads(9, 3, 64, 64), Heads(4, 1, 256, 256), Heads(3, 3, 80, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_decode_batch_has_the_same_bits_on_any_number_of_threads(
    heads: Heads, dtype: torch.dtype, use_threads: Callable[[int], None]
) -> None:
    lengths = RAGGED[:9]
    sequences = [Tokens.random(n, heads, seed=n, dtype=dtype) for n in lengths]
    cache = PagedCache(heads, "int8", lengths, exact_dtype=dtype)
    cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
    parts = [(s, tokens, len(tokens) - 1, len(tokens)) for s, tokens in enumerate(sequences)]
    wanted = [cache.attend([part], RULES["everything"])[0] for part in parts]
    for threads, count in itertools.product((1, 2, 3), (1, 2, 5, 9)):
        use_threads(threads)
        rows = cache.attend(parts[:count], RULES["everything"])
        assert all(same_bits(own, want) for own, want in zip(rows, wanted)), f"{count} rows on {threads} threads"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("kv_dtype", ["fp32", "k8v4", "fp8"])
def test_every_block_size_gives_the_same_bits(kv_dtype: str, rule: Rule) -> None:
    rows = []
    for block_size in (8, 16, 32, 64, 128, 256):
        cache = PagedCache(Heads(), kv_dtype, [COUNT], exact_dtype=EXACT, block_size=block_size)
        cache.write([(0, TOKENS, 0, COUNT)])
        rows += cache.attend([(0, TOKENS, 190, COUNT)], rule)
    assert all(same_bits(rows[0], other) for other in rows[1:])


@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 72, 80, 104, 256])
def test_every_head_dim_has_the_same_bits_on_any_number_of_threads(
    head_dim: int, num_kv_heads: int, use_threads: Callable[[int], None]
) -> None:
    """Matrix products of one tile and of several are split over threads in different ways."""
    heads = Heads(3, num_kv_heads, head_dim, head_dim)
    tokens = Tokens.random(20, heads)
    cache = PagedCache(heads, "int8", [20])
    cache.write([(0, tokens, 0, 20)])
    rows = []
    for threads, query_len in itertools.product((1, 2, 3, 4), (1, 20)):
        use_threads(threads)
        rows.append(cache.attend([(0, tokens, 20 - query_len, 20)], Rule())[0][-1])
    assert all(same_bits(rows[0], other) for other in rows[1:])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_format_has_the_same_bits_on_any_number_of_threads(
    kv_dtype: str, use_threads: Callable[[int], None]
) -> None:
    tokens = Tokens.random(30, Heads())
    rows = []
    for threads in (1, 2, 3):
        use_threads(threads)
        rows.append(one_shot(kv_dtype, RULES["everything"], tokens))
    assert same_bits(rows[0], rows[1])
    assert same_bits(rows[0], rows[2])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("kv_dtype", ["bf16", "k8v4"])
def test_what_lies_in_the_cache_after_a_row_does_not_matter(kv_dtype: str, rule: Rule) -> None:
    """The chunk's later tokens, and bytes that a truncated or preempted run left there."""
    longer = PagedCache(Heads(), kv_dtype, [COUNT], exact_dtype=EXACT)
    longer.write([(0, TOKENS, 0, COUNT)])
    (rows,) = longer.attend([(0, TOKENS, 100, 150)], rule)
    assert same_bits(rows, one_shot(kv_dtype, rule)[100:150])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_chunks_write_the_bytes_of_one_shot(kv_dtype: str) -> None:
    caches = [PagedCache(Heads(), kv_dtype, [60], exact_dtype=EXACT) for _ in range(3)]
    for cache, chunk in zip(caches, (60, 33, 1)):
        for first in range(0, 60, chunk):
            cache.write([(0, TOKENS, first, min(first + chunk, 60))])
        for pool, other in zip(cache.pools, caches[0].pools):
            assert torch.equal(pool.arena, other.arena)
