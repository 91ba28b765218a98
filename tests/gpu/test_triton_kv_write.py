"""The Triton `kv_write` leaves the bytes of the reference, which are `lean.quant`'s, and touches nothing else."""

from dataclasses import replace

import pytest
import torch
from attention_oracle import FILLS, Heads, Tokens, exact_formats, filled
from triton_interpreter import triton_kernels

from lean.kernels.layout import KVLayout
from lean.kernels.ops import LayerPool, kv_write
from lean.kernels.triton import common
from lean.kernels.triton import kv_write as kernel
from lean.quant import KVFormat, codecs, parse_kv_dtype, rotate
from lean.quant.formats import UNIT

KV_DTYPES = ("fp32", "fp16", "bf16", "int8", "int4", "k8v4", "k=fp8,v=int8", "k6v4", "k=int5,v=int3")


def assert_same_bytes(
    formats: tuple[KVFormat, KVFormat], key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor | None = None
) -> None:
    """Write vectors [tokens, heads, dim] with both back ends into the middle layer of a poisoned arena."""
    layout = KVLayout(*formats, key.shape[1], key.shape[2], value.shape[2], 8)
    slots = torch.randperm(len(key), generator=torch.Generator().manual_seed(0)) + 8 if slots is None else slots
    arenas = [filled((len(key) // 8 + 2, 3 * layout.nbytes), "0x7f") for _ in range(2)]
    kv_write(LayerPool(arenas[0], layout, layout.nbytes), key, value, slots)
    with triton_kernels():
        kv_write(LayerPool(arenas[1], layout, layout.nbytes), key, value, slots)
    assert torch.equal(*arenas)


@pytest.mark.parametrize(
    ("kv_dtype", "dims"),
    [(name, dims) for name in KV_DTYPES for dims in ((64, 64), (96, 128), (128, 192), (256, 256))]
    + [(name, (16, 24)) for name in KV_DTYPES[:4] + KV_DTYPES[6:7] if name != "int4"],  # int3 to int6: 32 dims and more
    ids=str,
)
def test_every_format_and_head_dim_has_the_bytes_of_the_reference(kv_dtype: str, dims: tuple[int, int]) -> None:
    tokens = Tokens.random(19, Heads(3, 3, *dims))
    assert_same_bytes(parse_kv_dtype(kv_dtype), tokens.key, tokens.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
def test_every_input_dtype_and_the_exact_pool_have_the_bytes_of_the_reference(
    kv_dtype: str, dtype: torch.dtype
) -> None:
    tokens = Tokens.random(16, Heads(2, 2, 64, 64), dtype=dtype)
    formats = parse_kv_dtype(kv_dtype)
    for pair in (formats, exact_formats(formats, dtype)):
        assert_same_bytes(pair, tokens.key, tokens.value)


def unrotated(formats: str) -> KVFormat:
    return replace(parse_kv_dtype(formats)[0], rotate=False)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4", "int3g128"])
def test_ties_saturation_and_every_code_boundary_are_rounded_alike(kv_dtype: str) -> None:
    """The largest element makes the scale a power of two, so every boundary of codes is hit from both sides."""
    fmt = unrotated(kv_dtype)
    if kv_dtype == "fp8":
        codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        codes = torch.arange(0.0, fmt.max_code + 1)
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    values = torch.cat([values, -values])
    values = torch.nn.functional.pad(values, (0, -len(values) % 31)).view(-1, 31)
    x = torch.cat([torch.full((len(values), 1), fmt.max_code), values], dim=1)[:, None] * 2.0**-3
    assert_same_bytes((fmt, fmt), x, -x)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4", "int6", "fp16", "bf16"])
def test_extreme_vectors_have_the_bytes_of_the_reference(kv_dtype: str) -> None:
    """Zeros, subnormals, scales below the smallest and above the largest, infinities and NaN."""
    generator = torch.Generator().manual_seed(1)
    sizes = [0.0, -0.0, 1e-42, 1e-38, 1e-30, 2.0**-24, 1e-6, 1e-4, 0.0078, 1.0, 1e3, 1e4, 6e4, 1e6, 1e9, 1e30]
    x = torch.randn(len(sizes), 2, 64, generator=generator).clamp(-1.5, 1.5) * torch.tensor(sizes)[:, None, None]
    spoilt = x[8:14].clone()
    for row, value in zip(spoilt, (torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf, -torch.nan)):
        row[:, 5] = value
    fmt = parse_kv_dtype(kv_dtype)[0]
    if fmt.quantized:
        x = torch.cat([x, spoilt])
    for pair in ((fmt, fmt), (unrotated(kv_dtype),) * 2):
        assert_same_bytes(pair, x, x.flip(0))


def test_padding_and_views_of_packed_tensors_are_read_as_they_lie() -> None:
    tokens = Tokens.random(12, Heads(6, 2, 64, 64))
    packed = torch.cat((tokens.query, tokens.key, tokens.value), dim=1)
    _, key, value = packed.split([6, 2, 2], dim=1)
    slots = torch.tensor([9, -1, 8, 12, -7, 11, 10, 15, 14, -1, 13, 8 + 8])
    for kv_dtype in ("int8", "k8v4"):
        assert_same_bytes(parse_kv_dtype(kv_dtype), key, value, slots)
        assert_same_bytes(parse_kv_dtype(kv_dtype), key.mT.contiguous().mT, value, torch.full((12,), -1))


def test_the_kernels_constants_are_those_of_the_recipe() -> None:
    assert (kernel.MIN_SCALE.value, kernel.MAX_SCALE.value) == (codecs.MIN_SCALE, codecs.MAX_SCALE)
    names = "MIN_BYTE", "MAX_BYTE", "NAN_BYTE", "NUM_SCALES"
    assert [getattr(kernel, name).value for name in names] == [getattr(codecs, name) for name in names]
    assert common.UNIT.value == UNIT
    assert rotate(torch.ones(1, 4)).tolist() == [[2, 0, 0, 0]]
    assert set(FILLS) >= {"0x7f"}
