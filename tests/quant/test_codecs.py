"""int8 and fp8 against formulas that share no code with them: numpy, one rounding at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.overrides import TorchFunctionMode

from lean.quant import FP8, INT8, Kind, decode, encode, quantize_dequantize

FLAT = {"int8-": replace(INT8, rotate=False), "fp8": FP8}
FLAT |= {"int8-/32": replace(INT8, rotate=False, group_size=32), "fp8/32": replace(FP8, group_size=32)}
VARIANTS = {"int8": INT8, "fp8+": replace(FP8, rotate=True), **FLAT}

every_variant = pytest.mark.parametrize("fmt", VARIANTS.values(), ids=VARIANTS)
every_flat_variant = pytest.mark.parametrize("fmt", FLAT.values(), ids=FLAT)
every_dim = pytest.mark.parametrize("dim", [8, 24, 72, 80, 96, 112, 128, 256])
every_device = pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])

# e4m3fn by its definition: 4 exponent bits with bias 7, 3 mantissa bits, NaN only at 0x7f and 0xff.
LADDER = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127])
MIDDLES = (LADDER[1:] + LADDER[:-1]) / 2
E4M3 = np.array([*LADDER, np.nan, *-LADDER, np.nan])


def to_e4m3(z):
    """The nearest of the 254 finite codes, the even one of two equally near."""
    size = np.minimum(np.abs(z.astype(np.float64)), 448)
    code = np.searchsorted(MIDDLES, size)
    return code + (np.isin(size, MIDDLES) & (code % 2 == 1)) + 128 * np.signbit(z)


def turn(rows):
    """Signs, then block Hadamard: float32 additions with strides 1, 2, 4, ..., then one float32 multiply."""
    dim, stride = rows.shape[1], 1
    pairs = [(0, 3), (1, 4), (2, 5), (6, 7)]
    y = rows * np.array([(-1) ** sum(d >> a & d >> b & 1 for a, b in pairs) for d in range(dim)], np.float32)
    while dim % (2 * stride) == 0:
        low = np.array([i for i in range(dim) if not i & stride])
        a, b = y[:, low], y[:, low + stride]
        y[:, low], y[:, low + stride] = a + b, a - b
        stride *= 2
    return y * np.float32(1 / np.sqrt(stride))


def split(x, fmt):
    width = fmt.group_size or x.shape[1]
    return [x[:, start : start + width] for start in range(0, x.shape[1], width)]


def top_and_low(fmt):
    return (448, -448) if fmt.kind is Kind.E4M3 else (127, -127)


def expected(x, fmt):
    """Codes, scales and decoded float64 values of [rows, dim].

    It rounds where the recipe rounds: input to fp32, rotation in fp32, absmax / top to fp32 and then to fp16, y / s to
    fp32. numpy's float32 division is the IEEE one; everything after it is exact in float64.
    """
    y = turn(x.astype(np.float32)) if fmt.rotate else x.astype(np.float32)
    top, low = top_and_low(fmt)
    parts = []
    for group in split(y, fmt):
        with np.errstate(over="ignore"):
            s = np.clip((np.abs(group).max(1, keepdims=True) / np.float32(top)).astype(np.float16), 2**-14, 65504)
        z = group / s.astype(np.float32)
        if fmt.kind is Kind.E4M3:
            codes = to_e4m3(z)
            values = E4M3[codes]
        else:
            values = np.clip(np.rint(z.astype(np.float64)), low, top)
            codes = values.astype(int) % 256
        parts.append((codes.astype(np.uint8), s, values * s.astype(np.float64)))
    return tuple(np.concatenate(part, axis=1) for part in zip(*parts, strict=True))


def check(x, fmt, device="cpu"):
    """lean's codes, scales and decoded values of a numpy array are the expected ones, to the bit."""
    codes, scales = encode(torch.from_numpy(x).to(device), fmt)
    want_codes, want_scales, want_values = expected(x, fmt)
    np.testing.assert_array_equal(scales.cpu().numpy().view(np.uint16), want_scales.view(np.uint16))
    np.testing.assert_array_equal(codes.cpu().numpy(), want_codes)
    for dtype in (torch.float32, torch.float64):
        values = decode(codes, scales, fmt, dtype)
        assert values.dtype is dtype
        np.testing.assert_array_equal(values.cpu().numpy(), want_values)


def off_centre(rows, dim):
    """Vectors far from zero mean, of magnitudes 1e-4 to 1e4, with two outlier channels."""
    x = (np.random.default_rng(0).normal(size=(rows, dim)) + 4) * np.logspace(-4, 4, rows)[:, None]
    x[:, [1, dim // 2]] *= [-20, 9]
    return x.astype(np.float32)


@every_device
@every_dim
@every_variant
def test_bytes_are_those_of_the_recipe(fmt, dim, device):
    check(off_centre(64, dim), fmt, device)


@every_device
@every_flat_variant
def test_scale_is_a_quotient_and_not_a_product_with_the_reciprocal(fmt, device):
    """absmax * (1 / top) would round to another fp16 scale: for top 127 in the first row, 448 in others."""
    x = off_centre(4, 64) / 1e6
    x[:, [3, 40]] = [[float.fromhex(peak)] for peak in ("0x1.ff3982p8", "0x1.c967fep9", "0x1.9f83fep8", "0x1.64acp9")]
    check(x, fmt, device)


@given(st.data())
@settings(max_examples=100)
def test_bytes_are_those_of_the_recipe_for_any_finite_vector(data):
    fmt = data.draw(st.sampled_from(list(VARIANTS.values())))
    limit = 2.0**124 if fmt.rotate else float(np.float32(3e38))  # the rotation adds up to 8 of them
    numbers = st.floats(-limit, limit, width=32) | st.sampled_from([0.0, -0.0, 1.0, 3.5, -0.5, 1e-40, 448.0, 17.0])
    check(data.draw(arrays(np.float32, st.sampled_from([(1, 8), (2, 40), (1, 72)]), elements=numbers)), fmt)


@every_device
def test_every_e4m3_code_decodes_to_its_value(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    np.testing.assert_array_equal(decode(codes, torch.ones(1, device=device).half(), FP8).cpu().numpy(), E4M3)


def unit_scale_fp8(values):
    codes, scales = encode(torch.tensor([448.0, *values]), FP8)
    assert scales.item() == 1
    return codes[1:].tolist()


def test_encoding_inverts_decoding_for_the_254_finite_e4m3_codes():
    codes = [c for c in range(256) if c & 127 != 127]
    assert unit_scale_fp8(E4M3[codes]) == codes


def test_e4m3_rounds_to_the_nearest_code_and_ties_to_even():
    middles = MIDDLES.astype(np.float32)
    assert unit_scale_fp8(middles) == [c + c % 2 for c in range(126)]
    assert unit_scale_fp8(-middles) == [128 + c + c % 2 for c in range(126)]
    assert unit_scale_fp8(np.nextafter(middles, np.float32(0))) == list(range(126))
    assert unit_scale_fp8(np.nextafter(middles, np.float32(448))) == list(range(1, 127))


def test_e4m3_has_subnormals_from_2_to_the_minus_9_and_an_octave_from_256_to_448():
    assert unit_scale_fp8([2**-9, 2**-10, 2**-10 * 1.01, 3 * 2**-10, 2**-11, 7 * 2**-9, 2**-6]) == [1, 0, 1, 2, 0, 7, 8]
    assert unit_scale_fp8([256, 288, 320, 352, 384, 416, 447.9]) == [0x78, 0x79, 0x7A, 0x7B, 0x7C, 0x7D, 0x7E]


@every_device
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.3, 777.0])
@every_flat_variant
def test_quotients_halfway_between_two_codes_round_to_even_at_every_scale(fmt, scale, device):
    """A tie needs a true quotient: y * (1 / s) misses it."""
    middles = MIDDLES if fmt.kind is Kind.E4M3 else np.arange(top_and_low(fmt)[0]) + 0.5
    middles = np.resize(np.concatenate([middles, -middles]), (19, 15))
    x = np.insert(middles, 0, top_and_low(fmt)[0], axis=1) * np.float64(np.float16(scale))
    check(x.astype(np.float32), fmt, device)


def test_values_are_clamped_before_the_e4m3_cast():
    """Beyond 448 one version's cast saturates and another's gives NaN. 448.1 / 448 is rounded down to a scale of 1."""
    peaks = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to and torch.float8_e4m3fn in (*args, *(kwargs or {}).values()):
                peaks.append(args[0].abs().max().item())
            return func(*args, **(kwargs or {}))

    with Watch():
        codes, scales = encode(torch.tensor([[3e38, -3e38, 1, 2], [448.1, -448.1, 3, 0]]), FP8)
    assert peaks == [448]
    assert codes.tolist() == [[0x7E, 0xFE, 0, 0], [0x7E, 0xFE, 0x44, 0]]
    assert scales.tolist() == [[65504], [1]]


@every_variant
def test_zero_vectors_decode_to_exact_zeros(fmt):
    codes, scales = encode(torch.zeros(3, 80), fmt)
    assert not codes.any()
    assert (scales == 2**-14).all()
    assert torch.equal(quantize_dequantize(torch.zeros(3, 80), fmt), torch.zeros(3, 80))


@every_dim
@every_variant
def test_constant_vectors_come_back_within_the_rounding_of_the_scale(fmt, dim):
    x = torch.tensor([[1.0], [-0.3], [900.0], [0.05]]).expand(4, dim)
    torch.testing.assert_close(quantize_dequantize(x, fmt), x, rtol=2**-11 + 2**-20, atol=0)


@every_flat_variant
def test_huge_finite_values_saturate_and_tiny_ones_get_the_smallest_scale(fmt):
    x = np.array([[3e38, -3e38] * 20, [1e-6, -1e-7] * 20, [1e-40, -1e-45] * 20], dtype=np.float32)
    check(x, fmt)
    assert encode(torch.from_numpy(x), fmt)[1][:, 0].tolist() == [65504, 2**-14, 2**-14]
    values = quantize_dequantize(torch.from_numpy(x), fmt)
    assert values[0, :2].tolist() == [65504 * code for code in top_and_low(fmt)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 37, 79])
@every_variant
def test_a_non_finite_value_turns_its_groups_into_nan_and_touches_nothing_else(fmt, at, bad):
    x = torch.from_numpy(off_centre(5, 80))
    codes, scales = encode(x, fmt)
    values = decode(codes, scales, fmt)
    width = fmt.group_size or 80
    spread = 16 if fmt.rotate else 1  # the rotation spreads it over its block, which no group border cuts
    for i in {dim // width for dim in range(at - at % spread, at - at % spread + spread)}:
        codes[2, i * width * fmt.bits // 8 : (i + 1) * width * fmt.bits // 8] = 0
        scales[2, i] = values[2, i * width : (i + 1) * width] = torch.nan
    x[2, at] = bad
    got = encode(x, fmt)
    torch.testing.assert_close(got, (codes, scales), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(decode(*got, fmt), values, rtol=0, atol=0, equal_nan=True)


finite_vectors = arrays(np.float32, (1, 40), elements=st.floats(-4e5, 4e5, width=32))


@given(finite_vectors, st.sampled_from(list(FLAT.values())))
@settings(max_examples=100)
def test_error_is_at_most_half_a_step(x, fmt):
    """With z = y / s: integers err by s/2, e4m3 by s * max(|z| / 16, 2^-10), half its spacing at z.

    z can pass top by 2^-11 of it, as s may have been rounded down: that is less than half a step in each format.
    Rounding y / s to fp32 adds 2^-24 of |y|. s is at most 1 + 2^-11 times absmax / top, and never below 2^-14.
    """
    values = quantize_dequantize(torch.from_numpy(x), fmt).double().numpy()
    for group, value in zip(split(x.astype(np.float64), fmt), split(values, fmt), strict=True):
        s = max(np.abs(group).max() / top_and_low(fmt)[0] * (1 + 2**-11), 2**-14)
        half_step = np.maximum(np.abs(group) / 16, s * 2**-10) if fmt.kind is Kind.E4M3 else s / 2
        assert (np.abs(value - group) <= half_step + np.abs(group) * 2.0**-24).all()


@given(finite_vectors, st.sampled_from(list(FLAT.values())))
@settings(max_examples=100)
def test_encoding_a_decoded_vector_again_gives_the_same_bytes(x, fmt):
    first = encode(torch.from_numpy(x), fmt)
    assert all(map(torch.equal, encode(decode(*first, fmt), fmt), first))
