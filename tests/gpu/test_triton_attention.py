"""The Triton attention kernels equal attention computed in float64 from the formulas, row by row and to the bit."""

from dataclasses import replace

import pytest
import torch
from attention_oracle import RULES, Heads, PagedCache, Rule, Tokens, error, expected, same_bits
from triton_interpreter import parameters, plan_attention, triton_kernels

from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write, paged_attention
from lean.quant import parse_kv_dtype

KV_DTYPES = ("fp32", "fp16", "bf16", "int8", "fp8", "int4", "k8v4", "k=int6,v=int3", "k=int5,v=fp8")
ONE_HEAD = Heads(3, 1, 64, 64)
# Against the formula over the dequantized cache. float32 queries are computed in float32. Half queries: the query, the
# weights and, of int4, code x scale are rounded to 2^-11, bf16 rounds its output to 2^-8.
TIGHT = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 6e-3}


def decode_and_prefill(
    kv_dtype: str,
    rule: Rule,
    heads: Heads,
    dtype: torch.dtype,
    *,
    counts: tuple[int, ...] = (110, 300),
    **cache_options,
) -> float:
    """Largest error of one step: the second sequence's last row beside the last seven rows of the first."""
    sequences = [Tokens.random(count, heads, seed=count, dtype=dtype) for count in counts]
    cache = PagedCache(heads, kv_dtype, counts, exact_dtype=dtype, **cache_options)
    cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
    parts = [(s, tokens, len(tokens) - (7, 1)[s], len(tokens)) for s, tokens in enumerate(sequences)]
    with triton_kernels():
        rows = cache.attend(parts, rule)
    return max(
        error(own, expected(tokens, kv_dtype, rule, start, stop)) for own, (_, tokens, start, stop) in zip(rows, parts)
    )


@pytest.mark.parametrize(
    ("rule", "dtype"), [("full", torch.float16), ("everything", torch.float32), ("everything", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_decode_and_prefill_in_one_step_equal_the_formula(kv_dtype: str, rule: str, dtype: torch.dtype) -> None:
    assert decode_and_prefill(kv_dtype, RULES[rule], ONE_HEAD, dtype) < TIGHT[dtype]


@pytest.mark.parametrize("rule", ["window", "window, sinks", "residual", "sliding layer, residual"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "k8v4"])
def test_every_rule_equals_the_formula(kv_dtype: str, rule: str) -> None:
    assert decode_and_prefill(kv_dtype, RULES[rule], ONE_HEAD, torch.float32) < TIGHT[torch.float32]


@pytest.mark.parametrize("rule", [Rule(0, 0, 16, 33), Rule(20, 2, 16, 30), Rule(20, 6, 16, 2)], ids=str)
def test_exact_sinks_may_be_other_than_the_visible_sinks(rule: Rule) -> None:
    assert decode_and_prefill("int4", rule, ONE_HEAD, torch.float32, counts=(60, 45)) < TIGHT[torch.float32]


# How far the cache itself is from exact attention, for these tokens (normal, off centre): half a step of a code is
# 1/254 of a vector's largest element for int8, 2^-4 of every element for fp8, 1/14 of a group's largest for int4.
LOOSE = {"fp32": 4e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2, "fp8": 0.15, "int4": 0.5, "k8v4": 0.2}


@pytest.mark.parametrize("kv_dtype", LOOSE)
def test_a_quantized_cache_stays_near_exact_attention(kv_dtype: str) -> None:
    tokens = Tokens.random(111, ONE_HEAD)
    cache = PagedCache(ONE_HEAD, kv_dtype, [111])
    cache.write([(0, tokens, 0, 111)])
    with triton_kernels():
        rows = cache.attend([(0, tokens, 91, 111)], Rule(scale=0.125))[0]
    assert error(rows, expected(tokens, "fp64", Rule(scale=0.125), 91)) < LOOSE[kv_dtype]


LENGTHS = (1, 31, 32, 33, 63, 111, 1000)


@pytest.mark.parametrize(
    ("kv_dtype", "rule"), [("int8", "everything"), ("fp8", "everything"), ("int4", "everything"), ("bf16", "full")]
)
def test_odd_lengths_equal_the_formula_and_unwritten_memory_never_matters(kv_dtype: str, rule: str) -> None:
    """Stale memory of unwritten slots, evicted and null blocks, other layers, and the kernels' own buffers."""
    heads = Heads(2, 1, 32, 32)
    sequences = [Tokens.random(n, heads, seed=n) for n in LENGTHS]
    wanted: list[torch.Tensor] = []
    for fill in ("zeros", "0xff"):
        cache = PagedCache(heads, kv_dtype, LENGTHS, exact_dtype=torch.float32, fill=fill)
        cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
        cache.evict(0, RULES[rule])
        with triton_kernels():
            rows = cache.attend([(s, t, len(t) - 1, len(t)) for s, t in enumerate(sequences)], RULES[rule])
            rows += cache.attend([(s, sequences[s], max(0, LENGTHS[s] - 3), LENGTHS[s]) for s in (3, 5)], RULES[rule])
        wanted = wanted or rows
        assert all(same_bits(own, want) for own, want in zip(rows, wanted)), fill
    for own, tokens in zip(wanted, sequences):
        assert error(own, expected(tokens, kv_dtype, RULES[rule], len(tokens) - 1)) < TIGHT[torch.float32]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "bf16"])
def test_evicted_blocks_are_not_read(kv_dtype: str) -> None:
    heads, rule = Heads(2, 1, 32, 32), RULES["everything"]
    tokens = Tokens.random(300, heads)
    rows = []
    for evict in (False, True):
        cache = PagedCache(heads, kv_dtype, [300], exact_dtype=torch.float32)
        cache.write([(0, tokens, 0, 300)])
        with triton_kernels():
            for start, stop in ((290, 300), (299, 300)):
                if evict:
                    cache.evict(start, rule)
                rows.append(cache.attend([(0, tokens, start, stop)], rule)[0])
    assert same_bits(rows[0], rows[2])
    assert same_bits(rows[1], rows[3])


@pytest.mark.parametrize("dims", [(96, 96), (128, 128), (256, 256), (192, 128)], ids=str)
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "int4", "k8v4"])
def test_every_head_dim_equals_the_formula(kv_dtype: str, dims: tuple[int, int]) -> None:
    """A head_dim need not be a power of two, and K and V may differ in it."""
    heads, rule = Heads(2, 1, *dims), RULES["everything"]
    assert decode_and_prefill(kv_dtype, rule, heads, torch.float32, counts=(30, 70)) < TIGHT[torch.float32]


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim"), [("bf16", 16), ("int8", 24), ("bf16", 72), ("int8", 80), ("int8", 160)]
)
def test_other_head_dims_equal_the_formula(kv_dtype: str, head_dim: int) -> None:
    heads = Heads(2, 1, head_dim, head_dim)
    error_ = decode_and_prefill(kv_dtype, RULES["everything"], heads, torch.float32, counts=(20, 30))
    assert error_ < TIGHT[torch.float32]


@pytest.mark.parametrize(
    ("kv_dtype", "num_q_heads", "num_kv_heads"),
    [("k8v4", 2, 2), ("k8v4", 6, 2), ("fp16", 6, 2), ("k8v4", 5, 1), ("fp16", 8, 1), ("k8v4", 20, 1)],
)
def test_every_group_size_equals_the_formula(kv_dtype: str, num_q_heads: int, num_kv_heads: int) -> None:
    heads = Heads(num_q_heads, num_kv_heads, 32, 32)
    error_ = decode_and_prefill(kv_dtype, RULES["everything"], heads, torch.float32, counts=(40, 70))
    assert error_ < TIGHT[torch.float32]


@pytest.mark.parametrize(("kv_dtype", "block_size"), [("int8", 8), ("int8", 32), ("int8", 64), ("int4", 64)])
def test_every_block_size_equals_the_formula(kv_dtype: str, block_size: int) -> None:
    heads, rule = Heads(2, 1, 32, 32), RULES["everything"]
    assert decode_and_prefill(kv_dtype, rule, heads, torch.float32, block_size=block_size) < TIGHT[torch.float32]


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 129])
def test_windows_smaller_than_a_block_equal_the_formula(window: int) -> None:
    heads = Heads(2, 1, 32, 32)
    for rule in (Rule(window, num_sink_tokens=3), Rule(window, 3, 16, 3)):
        assert decode_and_prefill("k8v4", rule, heads, torch.float32, counts=(60, 150)) < TIGHT[torch.float32]


def test_softcap_bounds_the_scores_in_prefill_and_decode() -> None:
    """Both kernels apply the soft cap: capped and uncapped outputs differ."""
    for kv_dtype in ("int8", "bf16"):
        rule = Rule(scale=1.0, softcap=2.0)
        assert decode_and_prefill(kv_dtype, rule, ONE_HEAD, torch.float32) < TIGHT[torch.float32]
        tokens = Tokens.random(40, ONE_HEAD)
        cache = PagedCache(ONE_HEAD, kv_dtype, [40])
        cache.write([(0, tokens, 0, 40)])
        with triton_kernels():
            for start in (35, 39):
                capped, plain = (
                    cache.attend([(0, tokens, start, 40)], r)[0] for r in (rule, replace(rule, softcap=0.0))
                )
                assert (capped - plain).abs().max() > 0.1


@pytest.mark.parametrize("level", [-torch.inf, -5.0, 30.0])
def test_sink_logits_take_probability_and_give_no_value(level: float) -> None:
    tokens = Tokens.random(90, ONE_HEAD)
    sink_logits = level + torch.linspace(-2, 2, 3)
    cache = PagedCache(ONE_HEAD, "k8v4", [90], exact_dtype=torch.float32)
    cache.write([(0, tokens, 0, 90)])
    for rule in (RULES["full"], RULES["everything"]):
        for start in (85, 89):
            with triton_kernels():
                rows = cache.attend([(0, tokens, start, 90)], rule, sink_logits)[0]
            wanted = expected(tokens, "k8v4", rule, start, sink_logits=sink_logits)
            assert (rows - wanted).abs().max() < TIGHT[torch.float32] * expected(
                tokens, "k8v4", rule, start
            ).abs().max()


@pytest.mark.parametrize(("rule", "apart"), [("full", False), ("everything", False), ("everything", True)])
def test_empty_rows_are_zeros_and_empty_sequences_harmless(rule: str, apart: bool) -> None:
    tokens = Tokens.random(9, ONE_HEAD)
    cache = PagedCache(ONE_HEAD, "int8", [41] * 3, exact_dtype=torch.float32)
    cache.write([(1, tokens, 0, 9)])
    # No rows of a sequence with a cache, one row of a sequence without tokens, a prefill, two rows of no sequence.
    query = torch.cat((tokens.query[:1], tokens.query, tokens.query[:2]))
    with triton_kernels(apart=apart):
        out = cache.attend_packed(query, query, [0, 2, 1], [0, 1, 9], [33, 0, 9], RULES[rule])
        # As many rows as sequences, two of them of one sequence.
        pair = cache.attend_packed(tokens.query[7:], tokens.query[7:], [0, 1], [0, 2], [33, 9], RULES[rule])
        lone = cache.attend_packed(tokens.query[7:], tokens.query[7:], [1, 0], [1, 0], [8, 33], RULES[rule])
    assert not out[0].any()
    assert not out[10:].any()
    assert not lone[1:].any()
    tokens = replace(tokens, query_sink=tokens.query)
    wanted = expected(tokens, "int8", RULES[rule])
    assert error(out[1:10], wanted) < TIGHT[torch.float32]
    assert error(pair, wanted[7:]) < TIGHT[torch.float32]


def test_views_of_packed_and_of_head_major_tensors_are_read_as_they_lie() -> None:
    heads, rule = Heads(6, 2, 32, 32), RULES["window, sinks"]
    tokens = Tokens.random(5, heads)
    cache = PagedCache(heads, "int8", [5])
    cache.write([(0, tokens, 0, 5)])
    packed = torch.cat((tokens.query, tokens.key), dim=1)
    with triton_kernels():
        rows = [
            cache.attend_packed(query, query, [0], [5], [5], rule)
            for query in (tokens.query, packed[:, :6], tokens.query.transpose(0, 1).contiguous().transpose(0, 1))
        ]
    assert same_bits(rows[0], rows[1])
    assert same_bits(rows[0], rows[2])


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4"])
def test_blocks_beyond_two_gigabytes_are_reached(kv_dtype: str) -> None:
    """Byte offsets need 64 bits. The arena is never touched but for a few blocks, so it costs no memory."""
    heads = Heads(2, 1, 64, 64)
    layout = KVLayout(*parse_kv_dtype(kv_dtype), 1, 64, 64, 16)
    stride, count = 1 << 20, 4200
    arena = torch.empty(count, stride, dtype=torch.uint8)
    pool = LayerPool(arena, layout, stride - layout.nbytes)
    table = torch.tensor([[count - 1, 2049, 1, 4097]], dtype=torch.int32)
    arena[[0, *table[0].tolist()]] = 0xFF
    tokens = Tokens.random(60, heads)
    i = torch.arange(60)
    small = PagedCache(heads, kv_dtype, [60])
    small.write([(0, tokens, 0, 60)])
    with triton_kernels():
        kv_write(pool, tokens.key, tokens.value, table[0, i // 16].long() * 16 + i % 16)
        for start in (40, 59):
            ends = torch.tensor([0, 60 - start], dtype=torch.int32)
            length = torch.tensor([60], dtype=torch.int32)
            rows = paged_attention(tokens.query[start:], pool, table, ends, length, scale=0.25)
            assert same_bits(rows, small.attend([(0, tokens, start, 60)], Rule())[0])


@pytest.mark.parametrize(("kv_dtype", "count"), [("int8", 1 << 17), ("fp8", 1 << 15), ("int4", 1 << 15)])
def test_small_values_over_a_long_context_do_not_underflow(
    kv_dtype: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 1e-5 times V scales of 1e-4 are far below fp16: without a scale for each row 22% of V is lost."""
    heads = Heads(1, 1, 32, 32)
    chosen = parameters.DecodeParameters(tile=2048, exact_tile=16, split=16384, num_warps=4, num_stages=3)
    monkeypatch.setattr(plan_attention, "decode_parameters", lambda *args: chosen)
    tokens = Tokens.random(count, heads, dtype=torch.float16)
    tokens = replace(tokens, value=0.02 * tokens.value, query=0.2 * tokens.query)
    cache = PagedCache(heads, kv_dtype, [count], block_size=256)
    cache.write([(0, tokens, 0, count)])
    with triton_kernels():
        rows = cache.attend([(0, tokens, count - 1, count)], Rule())[0]
    assert error(rows, expected(tokens, kv_dtype, Rule(), count - 1)) < 1e-2


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
def test_half_queries_survive_key_scales_of_thousands(kv_dtype: str) -> None:
    """Neither a query beyond fp16 (bf16 reaches further) nor a scale near fp16's end overflows."""
    heads, rule = Heads(1, 1, 64, 64), Rule(scale=2.0**-30)
    tokens = Tokens.random(20, heads, dtype=torch.bfloat16)
    tokens = replace(tokens, query=tokens.query * 2.0**17, key=tokens.key * 2.0**13, value=tokens.value * 2.0**13)
    cache = PagedCache(heads, kv_dtype, [20])
    cache.write([(0, tokens, 0, 20)])
    with triton_kernels():
        for start in (10, 19):
            rows = cache.attend([(0, tokens, start, 20)], rule)[0]
            assert error(rows, expected(tokens, kv_dtype, rule, start)) < TIGHT[torch.bfloat16]
