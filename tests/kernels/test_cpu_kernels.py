"""The C++ kernels, every instruction set forced: the requirements of the torch reference, and its bytes."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import resident
import torch
from attention_oracle import RULES, Heads, PagedCache, Rule, Tokens, error, exact_formats, expected, filled, same_bits

from lean.kernels import ops, serving
from lean.kernels.cpu import binding, build
from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write
from lean.quant import KVFormat, encode, parse_kv_dtype
from lean.quant.codecs import RAW_DTYPES

pytestmark = pytest.mark.skipif(build.find_library() is None, reason=f"not built: {build.HOW}")
FORMATS = (
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "fp8",
    "int4",
    "k8v4",
    "k=int6,v=int3",
    "k=int3g32,v=int5",
    "k=fp8,v=int4g64",
)
CPU = torch.device("cpu")


@pytest.fixture(params=binding.ISAS, autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test runs once per instruction set of this CPU."""
    monkeypatch.setenv("LEAN_CPU_ISA", request.param)
    try:
        binding.choose()
    except ValueError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    monkeypatch.undo()
    binding.choose()
    torch.set_num_threads(1)


def test_the_name_of_the_back_end_contains_the_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving.backend(CPU) == f"C++ {isa} (cpu)"
    monkeypatch.setenv("LEAN_CPU_ISA", "avx1024")
    with pytest.raises(ValueError, match="LEAN_CPU_ISA='avx1024'"):
        serving.backend(CPU)


def test_the_reference_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens.random(40, Heads())
    native = PagedCache(Heads(), "bf16", [40]).run(tokens, Rule(), 40)
    monkeypatch.setenv("LEAN_KERNELS", "reference")
    assert "reference" in serving.backend(CPU)
    plain = PagedCache(Heads(), "bf16", [40]).run(tokens, Rule(), 40)
    assert not torch.equal(native, plain)
    assert error(native, plain.double()) < 4e-6


def awkward(dim: int) -> torch.Tensor:
    """[rows, 1, dim]: what rounds badly, overflows or is not finite, in rows of several sizes."""
    generator = torch.Generator().manual_seed(dim)
    rows = [torch.randn(dim, generator=generator) * 10.0**power for power in range(-42, 36, 3)]
    # Ties of every code and of the e4m3 ladder: multiples of 1/2, and of 2^-10 below it, beside the top of each format.
    for top in (127.0, 448.0, 7.0):
        rows.append((torch.arange(dim) - dim // 2) / 2.0)
        rows[-1][0] = top
        rows.append((torch.arange(dim) * 2.0 + 1) * 2.0**-10)
        rows[-1][1] = -top
        rows.append(torch.linspace(-top, top, dim).round() + 0.5)
        rows[-1][2] = top
    rows += [torch.zeros(dim), -torch.zeros(dim), torch.full((dim,), 3e38), torch.full((dim,), 1e-45)]
    for bad in (torch.nan, torch.inf, -torch.inf):
        rows.append(torch.randn(dim, generator=generator))
        rows[-1][dim // 2] = bad
    return torch.stack(rows)[:, None]


def written(x: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, as bytes, that kv_write leaves for x [tokens, 1, dim] as K; V is held to be the same."""
    count, _, dim = x.shape
    layout = KVLayout(fmt, fmt, 1, dim, dim, 256)
    arena = filled((2, layout.nbytes), "0xff")
    kv_write(LayerPool(arena, layout, 0), x, x, torch.arange(256, 256 + count))

    def part(start: int, row: int) -> torch.Tensor:
        return arena[1, start : start + count * row].view(count, row)

    codes, scales = part(0, fmt.code_bytes(dim)), part(layout.k_scales_offset, fmt.scale_bytes(dim))
    assert torch.equal(codes, part(layout.v_codes_offset, fmt.code_bytes(dim)))
    assert torch.equal(scales, part(layout.v_scales_offset, fmt.scale_bytes(dim)))
    return codes, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int3", "int4", "int5", "int6", "int4g64", "int3g128"])
def test_the_bytes_are_those_of_quant_for_every_vector(kv_dtype: str, rotated: bool, dtype: torch.dtype) -> None:
    fmt = replace(parse_kv_dtype(kv_dtype)[0], rotate=rotated)
    for dim in (8, 24, 64, 72, 80, 96, 112, 256):
        x = awkward(dim).to(dtype)
        codes, scales = encode(x[:, 0], fmt)
        own_codes, own_scales = written(x, fmt)
        assert torch.equal(own_scales, scales.contiguous().view(torch.uint8)), dim
        assert torch.equal(own_codes, codes), dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16"])
def test_raw_bytes_are_those_of_quant_and_nan_stays_nan(kv_dtype: str, rotated: bool, dtype: torch.dtype) -> None:
    """Which of the NaNs a rounded NaN becomes differs in torch itself, between whole vectors and their rest."""
    fmt = replace(parse_kv_dtype(kv_dtype)[0], rotate=rotated)
    for dim in (8, 24, 64, 72, 256):
        x = awkward(dim).to(dtype)
        wanted = encode(x[:, 0], fmt)[0].view(RAW_DTYPES[fmt.name])
        own = written(x, fmt)[0].view(wanted.dtype)
        assert torch.equal(own.isnan(), wanted.isnan()), dim
        bits = torch.int32 if wanted.itemsize == 4 else torch.int16
        finite = ~wanted.isnan()
        assert torch.equal(own.view(bits)[finite], wanted.view(bits)[finite]), dim


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_prefill_and_decode_equal_the_formula(kv_dtype: str, rule: Rule) -> None:
    heads = Heads()
    a, b = (Tokens.random(count, heads, seed=count) for count in (150, 331))
    cache = PagedCache(heads, kv_dtype, [150, 331], exact_dtype=torch.float32)
    cache.write([(1, b, 0, 330)])
    sink_logits = torch.linspace(-2, 3, heads.num_q_heads)
    parts = [(1, b, 330, 331), (0, a, 0, 150)]
    for rows, (_, tokens, start, stop) in zip(cache.step(parts, rule, sink_logits), parts):
        assert error(rows, expected(tokens, kv_dtype, rule, start, stop, sink_logits)) < 4e-6


@pytest.mark.parametrize("dims", [(n, n) for n in (16, 24, 64, 72, 80, 96, 112, 128, 256)] + [(192, 128), (24, 64)])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "int4", "k=int6,v=int3", "k=int3g32,v=int5"])
def test_every_head_dim_equals_the_formula_and_decodes_to_the_bits_of_prefill(
    kv_dtype: str, dims: tuple[int, int]
) -> None:
    heads, rule = Heads(6, 2, *dims), replace(RULES["everything"], scale=dims[0] ** -0.5)
    tokens = Tokens.random(140, heads)
    cache = PagedCache(heads, kv_dtype, [140], exact_dtype=torch.float32)
    rows = cache.run(tokens, rule, 140)
    assert error(rows, expected(tokens, kv_dtype, rule)) < 4e-6
    for count in (1, 2, 5):
        assert same_bits(cache.attend([(0, tokens, 140 - count, 140)], rule)[0], rows[-count:])


@pytest.mark.parametrize("num_q_heads", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 40])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8", "int4", "k=int5,v=int3"])
def test_every_group_size_equals_the_formula_and_decodes_to_the_bits_of_prefill(
    kv_dtype: str, num_q_heads: int
) -> None:
    heads = Heads(num_q_heads, 1, 64, 64)
    tokens = Tokens.random(70, heads)
    cache = PagedCache(heads, kv_dtype, [70])
    rule = Rule(scale=0.125)
    rows = cache.run(tokens, rule, 70)
    assert error(rows, expected(tokens, kv_dtype, rule)) < 4e-6
    assert same_bits(cache.attend([(0, tokens, 69, 70)], rule)[0], rows[-1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "int4"])
def test_half_queries_lose_nothing_but_the_rounding_of_the_output(kv_dtype: str, dtype: torch.dtype) -> None:
    tokens, rule = Tokens.random(130, Heads(), dtype=dtype), RULES["everything"]
    rows = PagedCache(Heads(), kv_dtype, [130], exact_dtype=dtype).run(tokens, rule, 130)
    wanted = expected(tokens, kv_dtype, rule)
    rounding = torch.finfo(dtype).eps / 2 * wanted.abs()
    assert ((rows.double() - wanted).abs() <= 1.001 * rounding + 4e-6 * wanted.abs().max()).all()


LENGTHS = (1500, 1, 511, 512, 513, 130, 1025)  # both sides of tiles and splits


@pytest.mark.parametrize("rule", ["full", "everything"])
@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8", "int4", "k=int6,v=int3"])
def test_a_row_has_the_same_bits_in_any_chunk_batch_and_number_of_threads(kv_dtype: str, rule: str) -> None:
    heads = Heads(4, 2, 32, 32)
    sequences = [Tokens.random(n, heads, seed=n) for n in LENGTHS]
    cache = PagedCache(heads, kv_dtype, LENGTHS, exact_dtype=torch.float32)
    cache.write([(s, tokens, 0, len(tokens)) for s, tokens in enumerate(sequences)])
    last = [(s, tokens, max(0, len(tokens) - 40), len(tokens)) for s, tokens in enumerate(sequences)]
    wanted = [cache.attend([part], RULES[rule])[0] for part in last]
    assert error(wanted[0], expected(sequences[0], kv_dtype, RULES[rule], LENGTHS[0] - 40)) < 4e-6
    for threads, count, batch in itertools.product((1, 2, 3, 8), (1, 3, 40), ((0,), range(len(LENGTHS)), (4, 1, 0))):
        torch.set_num_threads(threads)
        parts = [(s, sequences[s], max(0, LENGTHS[s] - count), LENGTHS[s]) for s in batch]
        for (s, _, start, stop), rows in zip(parts, cache.attend(parts, RULES[rule])):
            assert same_bits(rows, wanted[s][start - stop :]), f"sequence {s}, {count} rows, {threads} threads"


@pytest.mark.parametrize("poison", ["0x7f", "0xff", "fp16 nan"])
@pytest.mark.parametrize("rule", ["full", "window, sinks", "everything"])
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_what_no_row_sees_does_not_matter(kv_dtype: str, rule: str, poison: str) -> None:
    rows = []
    for fill in ("zeros", poison):
        tokens = Tokens.random(201, Heads(4, 2, 24, 24))
        cache = PagedCache(Heads(4, 2, 24, 24), kv_dtype, [201], exact_dtype=torch.float32, fill=fill, block_size=8)
        rows.append(cache.run(tokens, RULES[rule], 57, evict=True))
        rows.append(cache.run(tokens, RULES[rule], 1, start=195, evict=True))
    assert same_bits(rows[0], rows[2])
    assert same_bits(rows[1], rows[3])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "fp8", "int4"])
def test_a_non_finite_query_makes_only_its_own_row_nan(kv_dtype: str, bad: float) -> None:
    tokens = Tokens.random(60, Heads())
    cache = PagedCache(Heads(), kv_dtype, [60])
    rows = cache.run(tokens, Rule(), 60)
    tokens.query[30, 2, 5] = bad
    (spoilt,) = cache.attend([(0, tokens, 0, 60)], Rule())
    assert spoilt[30, 2].isnan().all()
    spoilt[30, 2] = rows[30, 2]
    assert same_bits(spoilt, rows)


def test_a_query_of_zeros_is_the_mean_of_what_it_sees() -> None:
    tokens = Tokens.random(60, Heads())
    tokens.query.zero_()
    assert error(PagedCache(Heads(), "int8", [60]).run(tokens, Rule(), 60), expected(tokens, "int8", Rule())) < 4e-6


def test_float64_stays_with_the_reference() -> None:
    tokens = Tokens.random(40, Heads(), dtype=torch.float64)
    rows = PagedCache(Heads(), "int8", [40]).run(tokens, Rule(), 40)
    assert error(rows, expected(tokens, "int8", Rule())) < 1e-12


def test_rotated_exact_copies_share_the_basis_of_the_quantized_ones() -> None:
    formats = exact_formats(parse_kv_dtype("int8"), torch.float32)
    x = torch.randn(5, 1, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(written(x, formats[0])[0], encode(x[:, 0], formats[0])[0])


def test_decode_needs_no_memory_that_grows_with_the_context() -> None:
    heads, count = Heads(8, 2, 128, 128), 8192
    layout = KVLayout(*parse_kv_dtype("int8"), 2, 128, 128, 32)
    arena = torch.zeros(count // 32 + 1, layout.nbytes, dtype=torch.uint8)
    pool, table = LayerPool(arena, layout, 0), torch.arange(1, count // 32 + 1).int()[None]
    ends, query = torch.tensor([0, 1]).int(), torch.randn(1, heads.num_q_heads, 128)
    ops.paged_attention(query, pool, table, ends, ends[1:], scale=0.1)
    resident.restart_peak()
    before = resident.peak()
    ops.paged_attention(query, pool, table, ends, torch.tensor([count]).int(), scale=0.1)
    assert resident.peak() - before < 4 * 2**20


def test_torch_and_the_kernels_share_one_pool_of_threads() -> None:
    """In a separate process, because other packages load their own libgomp."""
    code = """if True:
        from lean.kernels.cpu import binding
        assert binding.choose() is not None
        print(len({line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}))
    """
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"
