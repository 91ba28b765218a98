"""The Triton attention kernels equal attention computed in float64 from the formulas, row by row and to the bit."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from attention_oracle import RULES, Heads, PagedCache, Rule, Tokens, error, expected, same_bits
from torch._subclasses import FakeTensorMode
from triton_interpreter import TARGET, launch, parameters, triton_kernels

from lean.engine import deterministic as products
from lean.kernels.call import AttentionCall, WriteCall
from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write, paged_attention
from lean.kernels.triton import common
from lean.quant import parse_kv_dtype, raw_format

KV_DTYPES = ("fp32", "fp16", "bf16", "int8", "fp8", "int4", "k8v4", "k=int8,v=fp8")
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
    """N08: stale memory of unwritten slots, evicted and null blocks, other layers, and of the kernels' own buffers."""
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
    """N18: no power of two, nor K and V of one dim, is needed."""
    heads, rule = Heads(2, 1, *dims), RULES["everything"]
    assert decode_and_prefill(kv_dtype, rule, heads, torch.float32, counts=(30, 70)) < TIGHT[torch.float32]


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim"), [("bf16", 16), ("int8", 24), ("bf16", 72), ("int8", 80), ("int8", 160)]
)
def test_other_head_dims_equal_the_formula(kv_dtype: str, head_dim: int) -> None:
    heads = Heads(2, 1, head_dim, head_dim)
    error_ = decode_and_prefill(kv_dtype, RULES["everything"], heads, torch.float32, counts=(20, 30))
    assert error_ < TIGHT[torch.float32]


def test_what_no_kernel_serves_is_named() -> None:
    int4, int8, fp64 = (parse_kv_dtype(name)[0] for name in ("int4", "int8", "fp64"))
    assert launch.unsupported(int8, int8, 80, 80, torch.bfloat16) is None
    assert "head_dim 72" in (launch.unsupported(int4, int4, 72, 72, torch.bfloat16) or "")
    assert "fp64" in (launch.unsupported(fp64, fp64, 64, 64, torch.bfloat16) or "")
    assert "320" in (launch.unsupported(int8, int8, 320, 64, torch.bfloat16) or "")
    assert "float64" in (launch.unsupported(int8, int8, 64, 64, torch.float64) or "")


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
    """N17: in both kernels, and not by accepting and ignoring it."""
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
    """Weights of 1e-5 times V scales of 1e-4 are far below fp16: without a scale of their own 22% of V is lost."""
    heads = Heads(1, 1, 32, 32)
    chosen = parameters.DecodeParameters(tile=2048, exact_tile=16, split=16384, num_warps=4, num_stages=3)
    monkeypatch.setattr(launch, "decode_parameters", lambda *args: chosen)
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


def test_a_launch_depends_on_shapes_alone() -> None:
    """So that a step can be captured into a graph: planning reads no value, of tensors that have none."""
    layout = KVLayout(*parse_kv_dtype("int8"), 2, 64, 64, 16)
    exact = KVLayout(*(replace(raw_format(torch.bfloat16), rotate=True),) * 2, 2, 64, 64, 16)
    with torch.device("meta"):
        arena, exact_arena = (torch.empty(9, x.nbytes, dtype=torch.uint8) for x in (layout, exact))
        tables = torch.empty(4, 8, dtype=torch.int32)
        for rows in (4, 40):
            query = torch.empty(rows, 6, 64, dtype=torch.bfloat16)
            codes = [fmt.code for x in (layout, exact) for fmt in (x.k_format, x.v_format)]
            lengths = torch.empty(5, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
            call = AttentionCall(
                query, query, arena, tables, exact_arena, tables, *lengths, None,
                0, 0, 16, 2, 64, *codes, 0.125, 0.0, 70, 4, 16, 4,
            )  # fmt: skip
            out, launches = launch.plan_paged_attention(call, TARGET)
            assert out.shape == query.shape
            assert [planned.kernel.__name__ for planned in launches] == [
                "decode",
                "merge",
                "turn_query",
                "prefill",
                "merge",
            ][: 5 if rows > 4 else 2]


def test_what_changes_from_step_to_step_compiles_no_kernel_again() -> None:
    """Triton compiles anew for an integer of 1 and for a multiple of 16: no batch and no context may cause that."""
    layout = KVLayout(*parse_kv_dtype("int8"), 2, 64, 64, 16)
    exact = KVLayout(*(replace(raw_format(torch.bfloat16), rotate=True),) * 2, 2, 64, 64, 16)
    codes = [fmt.code for x in (layout, exact) for fmt in (x.k_format, x.v_format)]
    compiled: dict[str, set[tuple]] = {}
    for seqs, rows, blocks in ((1, 1, 1), (1, 70, 5), (3, 3, 16), (3, 40, 33), (16, 16, 320), (16, 512, 7)):
        with torch.device("meta"):
            arena, exact_arena = (torch.empty(9, x.nbytes, dtype=torch.uint8) for x in (layout, exact))
            x, slots = torch.empty(rows, 2, 64, dtype=torch.bfloat16), torch.empty(rows, dtype=torch.int64)
            tables, query = torch.empty(seqs, blocks, dtype=torch.int32), torch.empty(rows, 6, 64, dtype=torch.bfloat16)
            lengths = torch.empty(seqs + 1, dtype=torch.int32), torch.empty(seqs, dtype=torch.int32)
            call = AttentionCall(
                query, None, arena, tables, exact_arena, tables, *lengths, None,
                0, 0, 16, 2, 64, *codes, 0.125, 0.0, 0, 0, 64, 4,
            )  # fmt: skip
            _, launches = launch.plan_paged_attention(call, TARGET)
            launches += launch.plan_kv_write(WriteCall(arena, x, x, slots, 0, 16, *codes[:2]), TARGET)
        for planned in launches:
            assert planned.kernel.kwargs["do_not_specialize"] == common.OF_STEP
            key = tuple(
                value
                for name, value in planned.arguments.items()
                if isinstance(value, int | tuple) and name not in common.OF_STEP
            )
            compiled.setdefault(planned.kernel.__name__, set()).add(key)
    # Decode and its merge: of every row, or beside a prefill, which has a merge of its own.
    assert {name: len(keys) for name, keys in compiled.items()} == {
        "decode": 2,
        "merge": 3,
        "turn_query": 1,
        "prefill": 1,
        "kv_write": 1,
    }


COUNT = 200
ROW_HEADS = Heads(3, 1, 32, 32)
ROWS = Tokens.random(COUNT, ROW_HEADS)


def run(kv_dtype: str, rule: Rule, bounds: tuple[int, ...], *, apart: bool = False, seed: int = 0) -> torch.Tensor:
    """Rows from bounds[0] on, in steps that end at the other bounds."""
    cache = PagedCache(ROW_HEADS, kv_dtype, [COUNT], exact_dtype=torch.float32, seed=seed)
    cache.write([(0, ROWS, 0, bounds[0])])
    rows = []
    for start, stop in pairwise(bounds):
        cache.write([(0, ROWS, start, stop)])
        with triton_kernels(apart=apart):
            rows += cache.attend([(0, ROWS, start, stop)], rule)
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("kv_dtype", "rule"), [("int8", "full"), ("int8", "everything"), ("fp8", "everything"), ("int4", "everything"),
                           ("bf16", "full")]
)  # fmt: skip
def test_prefill_chunks_of_any_size_give_the_bits_of_one_shot(kv_dtype: str, rule: str) -> None:
    wanted = run(kv_dtype, RULES[rule], (160, COUNT))
    assert same_bits(run(kv_dtype, RULES[rule], (160, 177, 179, COUNT), seed=1), wanted)


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4"])
def test_deterministic_mode_gives_the_bits_of_decoding_token_by_token(kv_dtype: str) -> None:
    rule = RULES["everything"]
    stepwise = run(kv_dtype, rule, tuple(range(150, 156)))
    for bounds in ((150, 155), (150, 152, 155)):
        assert same_bits(run(kv_dtype, rule, bounds, apart=True), stepwise)


@pytest.mark.parametrize(("device", "calls"), [("cuda", 1), ("cpu", 0)])
def test_deterministic_mode_gives_attention_its_rows_apart_on_a_gpu(device: str, calls: int) -> None:
    layout = KVLayout(*parse_kv_dtype("int8"), 2, 64, 64, 16)
    with (
        FakeTensorMode(),
        torch.device(device),
        products.RowTiledProducts(),
        patch.object(products, "rows_apart", side_effect=list) as apart,
    ):
        pool = LayerPool(torch.empty(9, layout.nbytes, dtype=torch.uint8), layout, 0)
        tables, starts, lengths = (torch.empty(shape, dtype=torch.int32) for shape in ((3, 2), (4,), (3,)))
        out = paged_attention(torch.empty(20, 4, 64), pool, tables, starts, lengths, scale=0.125)
    assert out.shape == (20, 4, 64)
    assert apart.call_count == calls


@pytest.mark.parametrize(("kv_dtype", "rule"), [("int8", "full"), ("fp8", "everything"), ("int4", "everything")])
def test_a_decode_row_has_the_same_bits_in_any_batch(kv_dtype: str, rule: str) -> None:
    """Alone, beside longer and shorter ones, beside a prefill, and beside a neighbour full of NaN."""
    lengths = (150, 1, 300, 129)
    sequences = [Tokens.random(n, ROW_HEADS, seed=n) for n in lengths]
    nan = Tokens(*(x * torch.nan for x in vars(sequences[3]).values()))
    cache = PagedCache(ROW_HEADS, kv_dtype, (*lengths, 129), exact_dtype=torch.float32)
    cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate((*sequences, nan))])
    last = [(s, tokens, len(tokens) - 1, len(tokens)) for s, tokens in enumerate((*sequences, nan))]
    prefill = (3, sequences[3], 121, 129)
    with triton_kernels():
        alone = [cache.attend([part], RULES[rule])[0] for part in last]
        for batch in ([0, 1, 2, 3], [2, 0], [4, 0, 4, 1]):
            for s, own in zip(batch, cache.attend([last[s] for s in batch], RULES[rule])):
                assert own.isnan().all() if s == 4 else same_bits(own, alone[s])
        rows = cache.attend([prefill, last[0], last[2]], RULES[rule])
        assert same_bits(rows[0], cache.attend([prefill], RULES[rule])[0])
        assert same_bits(rows[1], alone[0])
        assert same_bits(rows[2], alone[2])


@pytest.mark.parametrize(
    ("kv_dtype", "rule"), [("int8", "full"), ("int8", "everything"), ("fp8", "everything"), ("int4", "everything"),
                           ("bf16", "everything")]
)  # fmt: skip
def test_keys_that_a_row_does_not_see_do_not_change_its_bits(kv_dtype: str, rule: str) -> None:
    """Later tokens of its own chunk a thousand times as large, and outside the window, must not move any scale."""
    wanted = run(kv_dtype, RULES[rule], (160, 180))
    i = torch.arange(COUNT)[:, None, None]
    large = torch.where((i >= 170) | (i < 40) & (i > 5) & bool(RULES[rule].window), 1000.0, 1.0)
    tokens = replace(ROWS, key=ROWS.key * large, value=ROWS.value * large)
    cache = PagedCache(ROW_HEADS, kv_dtype, [COUNT], exact_dtype=torch.float32)
    cache.write([(0, tokens, 0, 180)])
    with triton_kernels():
        rows = cache.attend([(0, ROWS, 160, 180)], RULES[rule])[0]
    assert same_bits(rows[:10], wanted[:10])
