"""pc3 to pc5 against formulas that share no code with them: numpy, one rounding at a time, one code at a time."""

import numpy as np
import pytest
import torch
from grid_bytes import code_at
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lean.quant import PC3, PC4, PC5, decode_channels, encode, encode_channels
from lean.quant.formats import CHANNEL_TOKENS

FORMATS = {fmt.name: fmt for fmt in (PC3, PC4, PC5)}
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
DIMS = (16, 64, 80, 96, 112, 128, 256)

# One-byte scales by their definition: five bits of exponent with bias 15, three of mantissa; 2^-14 to 61440 are used.
BYTES = np.arange(0x08, 0xF8)
SCALES = (8 + BYTES % 8) / 8 * 2.0 ** (BYTES // 8 - 15)


def channels_far_from_zero(dim, groups=3):
    """[groups, 32, dim]: channels of magnitudes 1e-5 to 1e5, and of offsets up to 100 standard deviations."""
    random = np.random.default_rng(0)
    x = random.normal(size=(groups, CHANNEL_TOKENS, dim)) + random.permutation(np.linspace(-100, 100, dim))
    return (x * random.permutation(np.logspace(-5, 5, dim))).astype(np.float32)


def expected(column, fmt):
    """(codes, scale byte, zero, values) of the 32 elements of a channel."""
    n = 2 ** (fmt.bits - 1)
    if not np.isfinite(column).all():
        return np.zeros(32, int), 0xFF, 0, np.full(32, np.nan)
    if not column.any():
        return np.zeros(32, int), 0, 0, np.zeros(32)
    low, high = column.min(), column.max()
    with np.errstate(over="ignore"):
        ratio = max((high - low) / np.float32(2 * n - 1), np.abs(column).max() / np.float32(126 + n))
        index = min(np.searchsorted(SCALES, np.float64(ratio)), len(SCALES) - 1)
        inverse = np.float32(1) / np.float32(SCALES[index])
        zero = int(np.clip(np.rint(low * inverse) + n, -128, 127))
        codes = np.clip(np.rint(column * inverse).astype(np.float64) - zero, -n, n - 1).astype(int)
    return codes, BYTES[index], zero, (codes + zero) * SCALES[index]


def check(x, fmt):
    dim = x.shape[-1]
    codes, channels = encode_channels(torch.from_numpy(x), fmt)
    assert codes.shape == (*x.shape[:-1], dim * fmt.bits // 8)
    assert channels.shape == (len(x), 2 * dim)
    assert codes[0].numel() + channels[0].numel() == CHANNEL_TOKENS * fmt.bytes_per_vector(dim)
    decoded = {
        dtype: decode_channels(codes.flatten(0, 1), channels, fmt, dtype).numpy()
        for dtype in (torch.float32, torch.float64)
    }
    for group in range(len(x)):
        for d in range(dim):
            want_codes, byte, zero, values = expected(x[group, :, d], fmt)
            assert (channels[group, d], channels[group, dim + d]) == (byte, zero % 256)
            found = [code_at(row, dim, d, fmt.bits) for row in codes[group].tolist()]
            np.testing.assert_array_equal(found, want_codes % 2**fmt.bits)
            for own in decoded.values():
                np.testing.assert_array_equal(own[32 * group : 32 * group + 32, d], values)


@pytest.mark.parametrize("dim", DIMS)
@every_format
def test_bytes_are_those_of_the_recipe(fmt, dim):
    check(channels_far_from_zero(dim, 1), fmt)


@given(st.data())
@settings(max_examples=40)
def test_bytes_are_those_of_the_recipe_for_any_numbers(data):
    fmt = data.draw(st.sampled_from([PC3, PC4, PC5]))
    limit = float(np.float32(3e38))
    numbers = st.floats(-limit, limit, width=32) | st.sampled_from([0.0, -0.0, 1.0, 3.5, 1e-40, 448.0, torch.nan])
    check(data.draw(arrays(np.float32, (1, 32, 16), elements=numbers, fill=numbers)), fmt)


@every_format
def test_zero_vectors_decode_to_exact_zeros(fmt):
    codes, channels = encode_channels(torch.zeros(2, 32, 80), fmt)
    assert not codes.any()
    assert not channels.any()
    assert torch.equal(decode_channels(codes, channels[:, None], fmt), torch.zeros(2, 32, 80))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@every_format
def test_a_non_finite_element_turns_its_channel_into_nan_and_touches_nothing_else(fmt, bad):
    x = torch.from_numpy(channels_far_from_zero(64))
    values = decode_channels(*(part.flatten(0, -2) for part in encode_channels(x, fmt)), fmt).view_as(x)
    x[1, 7, 20] = bad
    codes, channels = encode_channels(x, fmt)
    assert (channels[1, 20], channels[1, 64 + 20]) == (0xFF, 0)
    assert not any(code_at(row, 64, 20, fmt.bits) for row in codes[1].tolist())
    values[1, :, 20] = torch.nan
    found = decode_channels(codes.flatten(0, 1), channels, fmt).view_as(x)
    torch.testing.assert_close(found, values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [1.0, -3.7, 1e-2, 250.0, -6e4])
@every_format
def test_a_constant_channel_is_kept_to_half_a_step_of_its_zero(fmt, value):
    """The zero has 8 bits, and the scale is at most an eighth larger than it must be."""
    codes, channels = encode_channels(torch.full((32, 16), value), fmt)
    found = decode_channels(codes, channels[None], fmt)
    assert (found == found[0]).all()
    assert (found - value).abs().max() <= abs(value) / (126 + 2 ** (fmt.bits - 1)) * 1.125 / 2


@pytest.mark.parametrize("offset", [0.0, 5.0, 20.0, 100.0, -100.0])
@every_format
def test_no_element_is_clipped_at_any_offset(fmt, offset):
    """So no error exceeds half a step, whose width the range or the offset gives. At the ends it may, by rounding."""
    x = torch.randn(50, 32, 16, generator=torch.Generator().manual_seed(0)) + offset
    codes, channels = encode_channels(x, fmt)
    error = (decode_channels(codes.flatten(0, 1), channels, fmt).view_as(x) - x).abs().amax(1)
    n = 2 ** (fmt.bits - 1)
    span = x.amax(1) - x.amin(1)
    step = torch.maximum(span / (2 * n - 1), x.abs().amax(1) / (126 + n)) * 1.125
    assert (error <= step * 0.5001).all()


@pytest.mark.parametrize(("fmt", "error"), [(PC3, 0.180), (PC4, 0.083), (PC5, 0.041)], ids=FORMATS)
def test_error_on_gaussian_channels(fmt, error):
    """Relative RMS error: that of a grid over the range of 32 numbers, 4.1 standard deviations in the mean."""
    x = torch.randn(200, 32, 64, generator=torch.Generator().manual_seed(0))
    codes, channels = encode_channels(x, fmt)
    found = (decode_channels(codes.flatten(0, 1), channels, fmt).view_as(x) - x).square().mean().sqrt().item()
    assert found == pytest.approx(error, rel=0.03)


@every_format
def test_leading_shape_and_strides_do_not_matter(fmt):
    x = torch.from_numpy(channels_far_from_zero(32, 6)).view(2, 3, 32, 32)
    codes, channels = encode_channels(x, fmt)
    for found, one in zip((codes, channels), encode_channels(x[1, 2], fmt)):
        assert torch.equal(found[1, 2], one)
    turned = encode_channels(x.mT.contiguous().mT, fmt)
    assert torch.equal(turned[0], codes)
    assert torch.equal(turned[1], channels)


@every_format
def test_vectors_alone_are_refused(fmt):
    with pytest.raises(ValueError, match=f"{fmt.name} encodes 32 tokens together"):
        encode(torch.zeros(1, 64), fmt)
