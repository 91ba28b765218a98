"""`paged_attention` equals attention computed in float64 from the formulas."""

import pytest
import torch
from attention_oracle import KV_DTYPES, RULES, Heads, PagedCache, Rule, Tokens, error, expected

from lean.kernels.ops import kv_write
from lean.quant import rotate_back

TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6}
EVERYTHING = RULES["everything"]


def prefill_error(heads: Heads, kv_dtype: str, rule: Rule, *, count: int = 50, block_size: int = 16) -> float:
    """How far a prefill of ``count`` tokens in float64 is from the formula."""
    tokens = Tokens.random(count, heads, dtype=torch.float64)
    cache = PagedCache(heads, kv_dtype, [count], block_size=block_size, exact_dtype=torch.float64)
    return error(cache.run(tokens, rule, count), expected(tokens, kv_dtype, rule))


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        *[pytest.param(rule, torch.float64, id=name) for name, rule in RULES.items()],
        *[pytest.param(RULES[name], torch.float32, id=f"{name}, float32") for name in ("full", "everything")],
    ],
)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_prefill_chunk_and_decode_in_one_batch_equal_the_formula(kv_dtype: str, rule: Rule, dtype: torch.dtype) -> None:
    heads = Heads()
    a, b, c = (Tokens.random(count, heads, seed=count, dtype=dtype) for count in (150, 331, 60))
    cache = PagedCache(heads, kv_dtype, [150, 331, 60], exact_dtype=dtype)
    cache.write([(1, b, 0, 330), (2, c, 0, 20)])
    parts = [(2, c, 20, 60), (1, b, 330, 331), (0, a, 0, 150)]
    for rows, (_, tokens, start, stop) in zip(cache.step(parts, rule), parts):
        assert error(rows, expected(tokens, kv_dtype, rule, start, stop)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dims", [(n, n) for n in (16, 24, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256)], ids=str)
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8", "int4"])
def test_every_head_dim_equals_the_formula(kv_dtype: str, dims: tuple[int, int]) -> None:
    assert prefill_error(Heads(3, 1, *dims), kv_dtype, EVERYTHING) < 1e-12


@pytest.mark.parametrize("dims", [(192, 128), (24, 64), (64, 16), (96, 80)], ids=str)
@pytest.mark.parametrize("kv_dtype", ["bf16", "k8v4", "k=int4,v=int8", "k=fp8,v=int4", "k=int8,v=fp8"])
def test_keys_and_values_may_differ_in_head_dim_and_format(kv_dtype: str, dims: tuple[int, int]) -> None:
    assert prefill_error(Heads(4, 2, *dims), kv_dtype, EVERYTHING) < 1e-12


@pytest.mark.parametrize("head_dim", [1, 5, 20, 33])
def test_unrotated_exact_caches_take_any_head_dim(head_dim: int) -> None:
    assert prefill_error(Heads(2, 1, head_dim, head_dim), "fp64", RULES["window, sinks"]) < 1e-12


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 2), (9, 3), (8, 2), (7, 1), (9, 1), (16, 1), (40, 2)]
)
@pytest.mark.parametrize("kv_dtype", ["fp16", "k8v4"])
def test_every_group_size_equals_the_formula(kv_dtype: str, num_q_heads: int, num_kv_heads: int) -> None:
    assert prefill_error(Heads(num_q_heads, num_kv_heads, 16, 16), kv_dtype, EVERYTHING) < 1e-12


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_every_block_size_equals_the_formula(rule: Rule, block_size: int) -> None:
    heads = Heads(2, 1, 16, 16)
    assert prefill_error(heads, "k8v4", rule, count=300, block_size=block_size) < 1e-12


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 255, 256, 257, 500])
@pytest.mark.parametrize("residual_length", [0, 1, 16, 300])
def test_windows_and_residuals_of_any_length_equal_the_formula(window: int, residual_length: int) -> None:
    rule = Rule(window, num_sink_tokens=3, residual_length=residual_length, num_exact_sinks=3 if residual_length else 0)
    assert prefill_error(Heads(2, 1, 16, 16), "int4", rule, count=290) < 1e-12


@pytest.mark.parametrize("rule", [Rule(0, 0, 16, 0), Rule(0, 0, 16, 33), Rule(20, 2, 16, 30), Rule(20, 6, 16, 2)])
def test_exact_sinks_may_be_other_than_the_visible_sinks(rule: Rule) -> None:
    assert prefill_error(Heads(), "int4", rule) < 1e-12


@pytest.mark.parametrize("query_len", [1, 40])
@pytest.mark.parametrize("rule", [Rule(scale=1.0), RULES["window, sinks"], RULES["residual"]], ids=str)
def test_softcap_bounds_the_scores_in_prefill_and_decode(rule: Rule, query_len: int) -> None:
    rule = Rule(**{**vars(rule), "softcap": 2.0})
    tokens = Tokens.random(90, Heads())
    cache = PagedCache(Heads(), "int8", [90], exact_dtype=torch.float32)
    cache.write([(0, tokens, 0, 90)])
    parts = [(0, tokens, 90 - query_len, 90)]
    (rows,) = cache.attend(parts, rule)
    assert error(rows, expected(tokens, "int8", rule, 90 - query_len)) < 4e-6
    (uncapped,) = cache.attend(parts, Rule(**{**vars(rule), "softcap": 0.0}))
    assert (rows - uncapped).abs().max() > 0.1


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("level", [-5.0, 0.0, 30.0])
def test_sink_logits_take_probability_and_give_no_value(level: float, rule: Rule) -> None:
    heads = Heads()
    tokens = Tokens.random(90, heads, dtype=torch.float64)
    sink_logits = level + torch.linspace(-2, 2, heads.num_q_heads, dtype=torch.float64)
    cache = PagedCache(heads, "k8v4", [90], exact_dtype=torch.float64)
    (rows,) = cache.step([(0, tokens, 0, 90)], rule, sink_logits)
    # The first row sees itself alone; the logit is the only thing that keeps it from being v[0].
    assert error(rows, expected(tokens, "k8v4", rule, sink_logits=sink_logits)) < 1e-12


def test_a_sink_logit_of_minus_infinity_is_no_sink_logit() -> None:
    tokens = Tokens.random(40, Heads())
    cache = PagedCache(Heads(), "int8", [40])
    (rows,) = cache.step([(0, tokens, 0, 40)], Rule(), torch.full((6,), -torch.inf))
    assert error(rows, expected(tokens, "int8", Rule())) < 4e-6


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("sink_logits", [None, torch.ones(6)], ids=["plain", "sink_logits"])
def test_empty_rows_are_zeros_and_empty_sequences_harmless(rule: Rule, sink_logits: torch.Tensor | None) -> None:
    tokens = Tokens.random(41, Heads())
    cache = PagedCache(Heads(), "int8", [41] * 3, exact_dtype=torch.float32)
    cache.write([(1, tokens, 0, 41)])
    # No rows of a sequence with a cache, one row of a sequence without tokens, a prefill, two rows of no sequence.
    query = torch.cat((tokens.query[:1], tokens.query, tokens.query[:2]))
    out = cache.attend_packed(query, query, [0, 2, 1], [0, 1, 41], [33, 0, 41], rule, sink_logits)
    assert not out[0].any()
    assert not out[42:].any()
    tokens = Tokens(tokens.query, tokens.query, tokens.key, tokens.value)
    assert error(out[1:42], expected(tokens, "int8", rule, sink_logits=sink_logits)) < 4e-6


@pytest.mark.parametrize("rule", [RULES["window, sinks"], EVERYTHING], ids=str)
def test_without_a_query_for_the_sinks_the_query_itself_serves(rule: Rule) -> None:
    tokens = Tokens.random(120, Heads())
    cache = PagedCache(Heads(), "int4", [120], exact_dtype=torch.float32)
    cache.write([(0, tokens, 0, 120)])
    rows = cache.attend_packed(tokens.query, None, [0], [120], [120], rule)
    assert torch.equal(rows, cache.attend_packed(tokens.query, tokens.query, [0], [120], [120], rule))
    assert not torch.equal(rows, cache.attend([(0, tokens, 0, 120)], rule)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "int4"])
def test_half_queries_lose_nothing_but_the_rounding_of_the_output(
    kv_dtype: str, rule: Rule, dtype: torch.dtype
) -> None:
    tokens = Tokens.random(130, Heads(), dtype=dtype)
    cache = PagedCache(Heads(), kv_dtype, [130], exact_dtype=dtype)
    rows = cache.run(tokens, rule, 130)
    wanted = expected(tokens, kv_dtype, rule)
    assert rows.dtype is dtype
    rounding = torch.finfo(dtype).eps / 2 * wanted.abs()
    assert ((rows.double() - wanted).abs() <= 1.001 * rounding + 4e-6 * wanted.abs().max()).all()


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "int4"])
def test_views_of_packed_and_of_head_major_tensors_are_read_as_they_lie(kv_dtype: str) -> None:
    tokens, rule = Tokens.random(16, Heads()), RULES["window, sinks"]
    packed = torch.cat((tokens.query, tokens.key, tokens.value), dim=1)
    rows = []
    for arranged in (packed, packed.transpose(0, 1).contiguous().transpose(0, 1)):
        for copy in (False, True):
            query, key, value = (x.clone() if copy else x for x in arranged.split([6, 2, 2], dim=1))
            cache = PagedCache(Heads(), kv_dtype, [16])
            kv_write(cache.pools[0], key, value, cache.tables[0][0, 0].long() * 16 + torch.arange(16))
            rows.append(cache.attend_packed(query, query, [0], [16], [16], rule))
    assert all(torch.equal(rows[0], other) for other in rows[1:])
    assert error(rows[0], expected(Tokens(tokens.query, tokens.query, tokens.key, tokens.value), kv_dtype, rule)) < 4e-6


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("meets", ["a zero code", "the largest code"])
def test_fp16_queries_survive_key_scales_of_thousands(kv_dtype: str, meets: str) -> None:
    """A query of 40 times a key scale of 4000 is beyond fp16, whether or not the code it meets is zero."""
    heads = Heads(1, 1, 64, 64)
    basis = torch.eye(64) if kv_dtype == "fp8" else rotate_back(torch.eye(64))
    largest = {"int8": 127, "fp8": 448, "int4": 7.5}[kv_dtype] * 4096.0
    query = 40 * basis[0 if meets == "a zero code" else 1]
    tokens = Tokens.random(20, heads)
    key = torch.where(torch.arange(20)[:, None] % 2 == 0, largest * basis[1], tokens.key[:, 0])[:, None]
    tokens = Tokens(query.expand(20, 1, 64), query.expand(20, 1, 64), key, tokens.value)
    halves = Tokens(tokens.query.half(), tokens.query.half(), tokens.key, tokens.value)
    rows, half_rows = (PagedCache(heads, kv_dtype, [20]).run(t, Rule(scale=0.125), 20) for t in (tokens, halves))
    assert error(rows, expected(tokens, kv_dtype, Rule(scale=0.125))) < 4e-6
    assert error(half_rows, rows.double()) < 2**-10
