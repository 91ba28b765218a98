"""V as the first numbers of K, stored once (latent attention): the formula, the reference and the C++ kernels."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_oracle import RULES, Heads, PagedCache, Rule, Tokens, error, expected, filled, same_bits

from lean.kernels import naive, reference
from lean.kernels.call import from_arguments
from lean.kernels.cpu import binding, build
from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write
from lean.kernels.parts import gather
from lean.quant import encode, parse_kv_dtype

FORMATS = ("fp32", "bf16", "int8", "fp8", "int4")
HEADS = Heads(6, 1, 72, 64, v_in_k=True)
REAL = (Heads(20, 1, 576, 512, v_in_k=True), Heads(40, 1, 288, 256, v_in_k=True), Heads(3, 1, 40, 32, v_in_k=True))
LOGITS = torch.linspace(-2, 3, HEADS.num_q_heads)
SERVERS = ["naive", "reference", *(isa for isa in binding.ISAS if build.find_library() is not None)]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The ops are served by the formula, by the reference, or by an instruction set of the C++ kernels."""
    if request.param in binding.ISAS:
        monkeypatch.setenv("LEAN_CPU_ISA", request.param)
        try:
            binding.choose()
        except ValueError:
            pytest.skip(f"this CPU has no {request.param}")
    else:
        serve = {"naive": naive, "reference": reference}[request.param].paged_attention
        monkeypatch.setattr(torch.ops.lean, "paged_attention", from_arguments("paged_attention", serve))
        monkeypatch.setattr(torch.ops.lean, "kv_write", from_arguments("kv_write", reference.kv_write))
    yield request.param
    monkeypatch.undo()
    binding.choose()
    torch.set_num_threads(1)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_block_holds_k_alone(kv_dtype: str) -> None:
    fmt = parse_kv_dtype(kv_dtype)[0]
    layout = KVLayout(fmt, fmt, 1, 576, 512, 32, v_in_k=True)
    nbytes = {"fp32": 2304, "bf16": 1152, "int8": 576 + 4, "fp8": 576 + 4, "int4": 288 + 18}[kv_dtype]
    assert layout.bytes_per_token == nbytes
    assert layout.nbytes == 32 * nbytes
    assert layout.offsets == (0, layout.k_scales_offset, 0, layout.k_scales_offset)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_the_bytes_are_those_of_k_and_nothing_else_is_written(server: str, kv_dtype: str) -> None:
    fmt = parse_kv_dtype(kv_dtype)[0]
    tokens = Tokens.random(40, HEADS)
    layout = KVLayout(fmt, fmt, 1, 72, 64, 64, v_in_k=True)
    arena = filled((2, layout.nbytes + 64), "0x7f")
    kv_write(LayerPool(arena, layout, 16), tokens.key, torch.full_like(tokens.value, torch.nan), torch.arange(64, 104))
    codes, scales = encode(tokens.key[:, 0], layout.k_stored)
    wanted = filled((2, layout.nbytes + 64), "0x7f")
    wanted[1, 16 : 16 + codes.numel()] = codes.flatten()
    start = 16 + layout.k_scales_offset
    wanted[1, start : start + scales.numel() * scales.element_size()] = scales.contiguous().view(torch.uint8).flatten()
    assert torch.equal(arena, wanted)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_prefill_chunk_and_decode_in_one_batch_equal_the_formula(server: str, kv_dtype: str, rule: Rule) -> None:
    a, b, c = (Tokens.random(count, HEADS, seed=count) for count in (150, 331, 60))
    cache = PagedCache(HEADS, kv_dtype, [150, 331, 60], exact_dtype=torch.float32)
    cache.write([(1, b, 0, 330), (2, c, 0, 20)])
    parts = [(2, c, 20, 60), (1, b, 330, 331), (0, a, 0, 150)]
    for rows, (_, tokens, start, stop) in zip(cache.step(parts, rule, LOGITS), parts):
        wanted = expected(tokens, kv_dtype, rule, start, stop, LOGITS, v_in_k=True)
        assert error(rows, wanted) < 4e-6


@pytest.mark.parametrize("heads", REAL, ids=str)
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_the_sizes_of_real_models_equal_the_formula(server: str, kv_dtype: str, heads: Heads) -> None:
    tokens, rule = Tokens.random(90, heads), replace(RULES["everything"], scale=heads.k_dim**-0.5)
    cache = PagedCache(heads, kv_dtype, [90], exact_dtype=torch.float32)
    rows = cache.run(tokens, rule, 64)
    assert error(rows, expected(tokens, kv_dtype, rule, v_in_k=True)) < 4e-6
    if server != "naive":  # it has no tiles: its order of additions depends on the number of rows
        for count in (1, 2, 5):
            assert same_bits(cache.attend([(0, tokens, 90 - count, 90)], rule)[0], rows[-count:])


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4"])
def test_a_row_has_the_same_bits_in_any_chunk_batch_and_number_of_threads(server: str, kv_dtype: str) -> None:
    if server == "naive":
        pytest.skip("the formula has no tiles")
    lengths = (1100, 1, 513, 130)
    sequences = [Tokens.random(n, HEADS, seed=n) for n in lengths]
    cache = PagedCache(HEADS, kv_dtype, lengths, exact_dtype=torch.float32)
    cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
    rule = RULES["everything"]
    last = [(s, tokens, max(0, len(tokens) - 40), len(tokens)) for s, tokens in enumerate(sequences)]
    wanted = [cache.attend([part], rule)[0] for part in last]
    for threads, count, batch in itertools.product((1, 2, 3), (1, 3, 40), ((0,), range(4), (3, 1, 0))):
        torch.set_num_threads(threads)
        parts = [(s, sequences[s], max(0, lengths[s] - count), lengths[s]) for s in batch]
        for (s, _, start, stop), rows in zip(parts, cache.attend(parts, rule)):
            assert same_bits(rows, wanted[s][start - stop :]), f"sequence {s}, {count} rows, {threads} threads"


@pytest.mark.parametrize("rule", ["full", "everything"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_what_no_row_sees_does_not_matter(server: str, kv_dtype: str, rule: str) -> None:
    rows = []
    for fill in ("zeros", "0x7f", "0xff", "fp16 nan"):
        tokens = Tokens.random(201, HEADS)
        cache = PagedCache(HEADS, kv_dtype, [201], exact_dtype=torch.float32, fill=fill, block_size=8)
        cache.write([(0, tokens, 0, 150)])
        rows.append(cache.run(tokens, RULES[rule], 17, start=150, evict=True))
    assert all(same_bits(rows[0], other) for other in rows[1:])


@pytest.mark.parametrize(
    ("kv_dtype", "k_dim", "v_dim"), [("int8", 64, 32), ("int4", 72, 48), ("bf16", 32, 40), ("int5", 576, 512)]
)
def test_a_prefix_that_ends_inside_a_group_or_a_rotation_or_lies_in_planes_is_refused(
    kv_dtype: str, k_dim: int, v_dim: int
) -> None:
    fmt = parse_kv_dtype(kv_dtype)[0]
    layout = KVLayout(fmt, fmt, 1, k_dim, v_dim, 16, v_in_k=True)
    with pytest.raises(ValueError, match=f"first {v_dim} of the {k_dim} numbers"):
        LayerPool(torch.zeros(2, layout.nbytes, dtype=torch.uint8), layout, 0)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_large_rest_of_a_key_costs_v_no_accuracy(server: str, kv_dtype: str) -> None:
    """Rotated positions are not normalised as latent vectors are: with one scale for both they would round V away."""
    errors = []
    for size in (1.0, 1000.0):
        tokens = Tokens.random(60, HEADS)
        tokens.key[..., 64:] *= size
        tokens.query[..., 64:] /= size
        cache = PagedCache(HEADS, kv_dtype, [60])
        rows = cache.run(tokens, Rule(), 60)
        errors.append(error(rows, expected(tokens, "fp64", Rule(), v_in_k=True)))
    assert errors[1] < 1.5 * errors[0] < 0.2


def test_keys_and_values_of_one_vector_have_one_format() -> None:
    layout = KVLayout(*parse_kv_dtype("k8v4"), 1, 72, 64, 16, v_in_k=True)
    with pytest.raises(ValueError, match="int8/int4"):
        LayerPool(torch.zeros(2, layout.nbytes, dtype=torch.uint8), layout, 0)


def test_blocks_with_one_word_of_scale_bytes_are_gathered_in_order():
    part = torch.arange(5 * 2 * 8, dtype=torch.uint8).view(5, 2, 8, 1)
    found = gather(part, torch.tensor([[1, 3]]))
    assert torch.equal(found[0], torch.cat([part[1], part[3]], dim=1))
