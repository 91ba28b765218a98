from dataclasses import FrozenInstanceError, replace
from itertools import product
from operator import attrgetter

import pytest
import torch

from lean.quant import (
    BF16,
    FORMATS,
    FP8,
    FP16,
    FP32,
    FP64,
    INT3,
    INT4,
    INT4G64,
    INT5,
    INT6,
    INT8,
    NAMES,
    PC3,
    PC4,
    PC5,
    KVFormat,
    decode,
    describe,
    encode,
    parse_kv_dtype,
    raw_format,
)

RAW = {torch.float64: FP64, torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}
NAME = attrgetter("name")
INT4_FLAT = replace(INT4, rotate=False)
QUANTIZED = (INT8, FP8, INT3, INT4, INT5, INT6)
BY_CHANNEL = (PC3, PC4, PC5)
OF_VECTORS = {name: fmt for name, fmt in FORMATS.items() if not fmt.by_channel}
DIMS = (8, 16, 24, 64, 72, 80, 96, 112, 128, 192, 256)


@pytest.mark.parametrize(
    ("name", "sizes"),
    {
        "fp64": [1024, 2048, 4096], "fp32": [512, 1024, 2048], "fp16": [256, 512, 1024], "bf16": [256, 512, 1024],
        "int8": [132, 260, 516], "fp8": [132, 260, 516], "int3": [50, 100, 200], "int4": [68, 136, 272],
        "int5": [82, 164, 328], "int6": [98, 196, 392],
        "int4g64": [66, 132, 264], "k8v4": [100, 198, 394], "k6v4": [82, 164, 328], "k5v4": [74, 148, 296],
        "pc4v3": [61, 122, 244], "k=pc3,v=int3": [53, 106, 212], "k=pc5,v=int5": [85, 170, 340],
    }.items(),
)  # fmt: skip
def test_bytes_per_token_and_head_are_those_of_the_table(name, sizes):
    k, v = parse_kv_dtype(name)
    assert [k.bytes_per_vector(d) + v.bytes_per_vector(d) for d in (64, 128, 256)] == sizes


@pytest.mark.parametrize(
    ("dim", "groups", "nbytes"),
    [(8, 1, 5), (24, 1, 13), (32, 1, 17), (40, 2, 22), (72, 3, 39), (80, 3, 43), (96, 3, 51), (112, 4, 60)],
)
def test_int4_counts_a_short_last_group_as_a_group(dim, groups, nbytes):
    assert (INT4.groups(dim), INT4.bytes_per_vector(dim)) == (groups, nbytes)


@pytest.mark.parametrize("fmt", [INT8, FP8], ids=NAME)
@pytest.mark.parametrize("dim", DIMS)
def test_eight_bit_formats_spend_two_bytes_beyond_their_codes(fmt, dim):
    assert (fmt.groups(dim), fmt.bytes_per_vector(dim)) == (1, dim + 2)


@pytest.mark.parametrize("fmt", RAW.values(), ids=NAME)
def test_raw_formats_have_no_scales(fmt):
    assert not fmt.quantized
    assert (fmt.groups(80), fmt.scale_bytes(80), fmt.bytes_per_vector(80)) == (0, 0, 80 * fmt.bits // 8)


def test_group_size_sets_the_number_of_scales():
    assert [replace(INT8, group_size=32).groups(d) for d in (24, 32, 80, 128)] == [1, 1, 3, 4]


@pytest.mark.parametrize("fmt", OF_VECTORS.values(), ids=OF_VECTORS)
@pytest.mark.parametrize("dim", DIMS)
def test_byte_counts_are_the_bytes_that_are_written(fmt, dim):
    codes, scales = encode(torch.randn(2, dim), fmt)
    assert codes.numel() + scales.numel() * scales.element_size() == 2 * fmt.bytes_per_vector(dim)


def test_table_lists_each_format_under_its_name():
    names = ["fp64", "fp32", "fp16", "bf16", "int8", "fp8", "int3", "int4", "int5", "int6"]
    assert [name for name in FORMATS if "g" not in name] == [*names, "pc3", "pc4", "pc5"]
    assert all(fmt.name == name for name, fmt in FORMATS.items())
    assert all(fmt.rotate == name.startswith(("int", "pc")) for name, fmt in FORMATS.items())
    assert set(NAMES) == {*names, "k8v4", "k6v4", "k5v4", "pc4v3"}


@pytest.mark.parametrize(
    ("text", "k", "v"),
    [
        ("int8", INT8, INT8),
        ("fp8", FP8, FP8),
        ("fp8_e4m3", FP8, FP8),
        ("bfloat16", BF16, BF16),
        ("k=float64,v=float32", FP64, FP32),
        ("k=float16,v=bf16", FP16, BF16),
        ("k8v4", INT8, INT4),
        ("k6v4", INT6, INT4G64),
        ("k5v4", INT5, INT4G64),
        ("pc4v3", PC4, INT3),
        ("k=pc3,v=bf16", PC3, BF16),
        ("v=int4, k=PC5", PC5, INT4),
        ("k=int3g32,v=int6g128", FORMATS["int3g32"], FORMATS["int6g128"]),
        ("int4g32", INT4, INT4),
        ("k=int3g64,v=int5", INT3, INT5),
        ("k=int8,v=int4", INT8, INT4),
        ("v=int4,k=int8", INT8, INT4),
        ("k=fp8_e4m3,v=bfloat16", FP8, BF16),
        (" INT4\n", INT4, INT4),
        (" K = fp8 , V = Int4 ", FP8, INT4),
    ],
)
def test_kv_dtype_reads_as(text, k, v):
    assert parse_kv_dtype(text) == (k, v)


UNREADABLE = [
    "", " ", "int2", "int4g", "int4g16", "int8g32",
    "fp8_e5m2", "auto", "int8,int4", "=", "k=int8", "k=int8,", "k=int8,v=", "k=int8,k=int4",
    "k=int8,v=int4,v=int4", "k=int8,v=int4,", "k=int8,q=int4", "k=int8=int4,v=int4", "k=k8v4,v=int4", "int8,v=int4",
]  # fmt: skip


@pytest.mark.parametrize("text", UNREADABLE)
def test_unreadable_kv_dtypes_are_refused(text):
    with pytest.raises(ValueError, match="KV format"):
        parse_kv_dtype(text)


@pytest.mark.parametrize("text", ["int2", "k=int2,v=int8"])
def test_error_names_the_unknown_format_and_the_choices(text):
    with pytest.raises(ValueError, match=r"'int2'.*int8.*int4.*k8v4.*int4g64"):
        parse_kv_dtype(text)


@pytest.mark.parametrize("text", ["pc4", "k=pc4,v=pc4", "k=pc4,v=pc3", "k=int8,v=pc5"])
def test_formats_of_keys_are_refused_for_values(text):
    with pytest.raises(ValueError, match=r"pc\d is a format of K alone: write k=\w+,v=int4"):
        parse_kv_dtype(text)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_offered_can_be_parsed(name):
    assert describe(*parse_kv_dtype(name)) == name


@pytest.mark.parametrize(("k", "v"), list(product(FORMATS.values(), OF_VECTORS.values())), ids=NAME)
def test_description_of_a_pair_parses_back_to_it(k, v):
    assert parse_kv_dtype(describe(k, v)) == (k, v)


def test_description_is_the_shortest_spelling():
    assert [describe(INT8, v) for v in (INT8, INT4, FP8)] == ["int8", "k8v4", "k=int8,v=fp8"]


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_op_code_brings_the_format_back(fmt, rotated):
    fmt = replace(fmt, rotate=rotated)
    assert type(fmt.code) is int
    assert KVFormat.from_code(fmt.code) == fmt


def test_op_codes_differ():
    formats = [replace(fmt, rotate=rotated) for fmt in FORMATS.values() for rotated in (False, True)]
    assert sorted(fmt.code for fmt in formats) == list(range(len(formats)))


@pytest.mark.parametrize("fmt", QUANTIZED, ids=NAME)
def test_quantized_formats_take_multiples_of_eight(fmt):
    assert all(fmt.supports(dim) for dim in DIMS)
    assert not any(fmt.supports(dim) for dim in (-8, 0, 1, 4, 12, 20, 33, 100))


@pytest.mark.parametrize("fmt", BY_CHANNEL, ids=NAME)
def test_formats_by_channel_take_multiples_of_sixteen(fmt):
    assert all(fmt.supports(dim) == (dim % 16 == 0) for dim in DIMS)
    assert not fmt.supports(0)


@pytest.mark.parametrize("fmt", BY_CHANNEL, ids=NAME)
def test_no_beginning_of_a_vector_by_channel_is_read_alone(fmt):
    assert not fmt.supports_prefix(576, 512)


@pytest.mark.parametrize("fmt", RAW.values(), ids=NAME)
def test_raw_formats_take_any_dim_unless_rotated(fmt):
    assert all(fmt.supports(dim) for dim in (1, 7, 33, 80))
    assert not fmt.supports(0)
    assert not replace(fmt, rotate=True).supports(33)


@pytest.mark.parametrize(("dtype", "fmt"), RAW.items())
def test_raw_format_of_a_dtype(dtype, fmt):
    assert raw_format(dtype) is fmt


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_other_dtypes_have_no_raw_format(dtype):
    with pytest.raises(KeyError):
        raw_format(dtype)


def test_formats_are_values():
    with pytest.raises(FrozenInstanceError):
        INT8.bits = 4  # type: ignore[misc]
    assert replace(INT8) == INT8
    assert len({INT8, replace(INT8), replace(INT8, rotate=False)}) == 2


@pytest.mark.parametrize(("dtype", "fmt"), RAW.items(), ids=str)
def test_raw_formats_return_every_value(dtype, fmt):
    x = torch.tensor([0.0, -0.0, 1.5, -3e-5, torch.inf, -torch.inf, torch.nan, 6e4], dtype=torch.float64).to(dtype)
    codes, scales = encode(x, fmt)
    assert torch.equal(codes, x.view(torch.uint8))
    assert scales.shape == (0,)
    torch.testing.assert_close(decode(codes, scales, fmt, torch.float64), x.double(), rtol=0, atol=0, equal_nan=True)


def test_int4_byte_k_holds_dim_k_low_and_dim_k_plus_half_a_unit_high():
    codes, scales = encode(torch.tensor([7.5, 1.5, -2.5, 3.5, -4.5, 5.5, -6.5, -7.5]), INT4_FLAT)
    assert codes.tolist() == [0xB7, 0x51, 0x9D, 0x83]
    assert scales.tolist() == [15 << 3]  # 1.0


def test_planes_of_a_unit_of_eight():
    """Bits 5..2 of dims 0..3 and 4..7 in four bytes, then bits 1..0 of dims 0, 2, 4, 6 and 1, 3, 5, 7 in two."""
    values = torch.tensor([31.5, -31.5, 0.5, -0.5, 1.5, 2.5, 3.5, -4.5])
    codes, _ = encode(values, replace(INT6, rotate=False))
    signed = [31, -32, 0, -1, 1, 2, 3, -5]
    assert codes[:4].tolist() == [(signed[k] >> 2) & 15 | ((signed[k + 4] >> 2) & 15) << 4 for k in range(4)]
    assert codes[4:].tolist() == [sum((signed[k + 2 * i] & 3) << 2 * i for i in range(4)) for k in range(2)]


def test_every_int4_byte_decodes_low_nibble_first():
    signed = [*range(8), *range(-8, 0)]
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 4)
    values = decode(codes, torch.full((256, 1), 15 << 3, dtype=torch.uint8), INT4)
    assert values.tolist() == [[signed[c % 16] + 0.5] * 4 + [signed[c // 16] + 0.5] * 4 for c in range(256)]


def bits_equal(a, b):
    return all(torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in zip(a, b, strict=True))


def off_centre(rows):
    noise = torch.randn(rows, 80, generator=torch.Generator().manual_seed(0))
    return (3 + noise) * torch.logspace(-3, 3, rows)[:, None]


@pytest.mark.parametrize("dtype", RAW, ids=str)
@pytest.mark.parametrize("fmt", QUANTIZED, ids=NAME)
def test_any_float_dtype_is_encoded_as_its_float32_value(fmt, dtype):
    x = off_centre(8).double().mul(1 + 1e-9).to(dtype)
    assert bits_equal(encode(x, fmt), encode(x.float(), fmt))


@pytest.mark.parametrize("fmt", [*OF_VECTORS.values(), INT4_FLAT], ids=[*OF_VECTORS, "int4-"])
def test_leading_shape_and_strides_do_not_matter(fmt):
    x = off_centre(24).view(2, 3, 4, 80)
    codes, scales = encode(x, fmt)
    assert (codes.shape, scales.shape) == ((2, 3, 4, fmt.code_bytes(80)), (2, 3, 4, fmt.groups(80)))
    assert bits_equal(encode(x[1, 2, 3], fmt), (codes[1, 2, 3], scales[1, 2, 3]))
    assert bits_equal(encode(x.permute(2, 0, 1, 3), fmt), (codes.permute(2, 0, 1, 3), scales.permute(2, 0, 1, 3)))
    assert bits_equal(encode(x.mT.contiguous().mT, fmt), (codes, scales))
    assert torch.equal(decode(codes[:, ::2], scales[:, ::2], fmt), decode(codes, scales, fmt)[:, ::2])
    assert decode(*encode(x[:0], fmt), fmt).shape == (0, 3, 4, 80)
