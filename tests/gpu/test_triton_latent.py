"""The Triton kernels where V is the first numbers of K: the formula, the bytes and the bits of rows."""

from dataclasses import replace

import pytest
import torch
from attention_oracle import RULES, Heads, PagedCache, Rule, Tokens, error, expected, filled, same_bits
from triton_interpreter import parameters, plan_attention, triton_kernels

from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write
from lean.kernels.triton.launch import lacking
from lean.quant import encode, parse_kv_dtype

FORMATS = ("fp32", "bf16", "int8", "fp8", "int4")
HEADS = Heads(5, 1, 96, 64, v_in_k=True)
REAL = (Heads(20, 1, 576, 512, v_in_k=True), Heads(40, 1, 288, 256, v_in_k=True), Heads(3, 1, 40, 32, v_in_k=True))
# As in test_triton_attention.py.
TIGHT = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 6e-3}


def decode_and_prefill(
    kv_dtype: str, rule: Rule, heads: Heads, dtype: torch.dtype, *, counts: tuple[int, ...] = (110, 300)
) -> float:
    """Largest error of one step: the second sequence's last row beside the last seven rows of the first."""
    sequences = [Tokens.random(count, heads, seed=count, dtype=dtype) for count in counts]
    cache = PagedCache(heads, kv_dtype, counts, exact_dtype=dtype)
    cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
    parts = [(s, tokens, len(tokens) - (7, 1)[s], len(tokens)) for s, tokens in enumerate(sequences)]
    with triton_kernels():
        rows = cache.attend(parts, rule)
    return max(
        error(own, expected(tokens, kv_dtype, rule, start, stop, v_in_k=True))
        for own, (_, tokens, start, stop) in zip(rows, parts)
    )


@pytest.mark.parametrize(
    ("rule", "dtype"), [("full", torch.float16), ("everything", torch.float32), ("everything", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_decode_and_prefill_in_one_step_equal_the_formula(kv_dtype: str, rule: str, dtype: torch.dtype) -> None:
    assert decode_and_prefill(kv_dtype, RULES[rule], HEADS, dtype) < TIGHT[dtype]


@pytest.mark.parametrize("rule", ["window", "window, sinks", "residual"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4"])
def test_every_rule_equals_the_formula(kv_dtype: str, rule: str) -> None:
    assert decode_and_prefill(kv_dtype, RULES[rule], HEADS, torch.float32, counts=(90, 130)) < TIGHT[torch.float32]


@pytest.mark.parametrize("heads", REAL, ids=str)
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4"])
def test_the_sizes_of_real_models_equal_the_formula(kv_dtype: str, heads: Heads) -> None:
    if kv_dtype == "int4" and heads.k_dim % 32:
        pytest.skip("groups of 32")
    rule = replace(RULES["everything"], scale=heads.k_dim**-0.5)
    assert decode_and_prefill(kv_dtype, rule, heads, torch.float32, counts=(20, 40)) < TIGHT[torch.float32]


def test_query_heads_are_cut_into_equal_parts() -> None:
    parts = {heads: parameters.latent_head_parts(heads) for heads in (1, 16, 17, 20, 32, 40, 64, 128)}
    assert parts == {1: 1, 16: 1, 17: 17, 20: 2, 32: 2, 40: 4, 64: 4, 128: 8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_the_bytes_are_those_of_k_and_nothing_else_is_written(kv_dtype: str, dtype: torch.dtype) -> None:
    fmt = parse_kv_dtype(kv_dtype)[0]
    tokens = Tokens.random(20, HEADS, dtype=dtype)
    layout = KVLayout(fmt, fmt, 1, 96, 64, 32, v_in_k=True)
    arena = filled((2, layout.nbytes + 64), "0x7f")
    with triton_kernels():
        kv_write(LayerPool(arena, layout, 16), tokens.key, tokens.value, torch.arange(32, 52))
    codes, scales = encode(tokens.key[:, 0], layout.k_stored)
    wanted = filled((2, layout.nbytes + 64), "0x7f")
    wanted[1, 16 : 16 + codes.numel()] = codes.flatten()
    start = 16 + layout.k_scales_offset
    wanted[1, start : start + scales.numel() * scales.element_size()] = scales.contiguous().view(torch.uint8).flatten()
    assert torch.equal(arena, wanted)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4"])
def test_unwritten_memory_never_matters_and_company_changes_no_bit(kv_dtype: str) -> None:
    lengths = (1, 31, 33, 111)
    sequences = [Tokens.random(n, HEADS, seed=n) for n in lengths]
    rule, wanted = RULES["everything"], []
    for fill in ("zeros", "0xff"):
        cache = PagedCache(HEADS, kv_dtype, lengths, exact_dtype=torch.float32, fill=fill)
        cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
        last = [(s, tokens, len(tokens) - 1, len(tokens)) for s, tokens in enumerate(sequences)]
        with triton_kernels():
            rows = cache.attend(last, rule)
            alone = [cache.attend([part], rule)[0] for part in last]
        assert all(same_bits(a, b) for a, b in zip(rows, alone))
        wanted = wanted or rows
        assert all(same_bits(own, want) for own, want in zip(rows, wanted)), fill


def test_larger_latent_vectors_are_left_to_the_reference() -> None:
    fmt = parse_kv_dtype("int8")[0]
    assert lacking(fmt, fmt, 576, 512, torch.bfloat16, v_in_k=True) is None
    assert "576" in lacking(fmt, fmt, 576, 512, torch.bfloat16)
    assert "1088" in lacking(fmt, fmt, 1088, 1024, torch.bfloat16, v_in_k=True)
    int4 = parse_kv_dtype("int4")[0]
    assert "40" in lacking(int4, int4, 40, 32, torch.bfloat16, v_in_k=True)
    assert plan_attention.Dims(*range(10)).head_parts == 9  # kernels read it by index
