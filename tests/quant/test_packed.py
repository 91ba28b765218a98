"""Packed weights multiply as their formula says, each row for itself, and only where torch's products can."""

import pytest
import torch
from torch import nn

from lean.quant import packed, unpacked
from lean.quant.packed import (
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    int4_bytes,
    int8_bytes,
    pack_int4,
    pack_int8,
    row_parts,
    why_not_int4,
    why_not_int8,
)
from lean.quant.rounding import nearest_groups

ULP = 2.0**-8  # bfloat16 has 8 bits


def drawn(outputs, inputs, group):
    """(codes, scales, zeros) with scales and zeros that bfloat16 holds."""
    generator = torch.Generator().manual_seed(outputs * inputs + group)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(outputs, inputs // group, generator=generator) * 0.1).bfloat16()
    zero = torch.randn(outputs, inputs // group, generator=generator).bfloat16() / 4
    return codes, scale, zero


def int4_layer(outputs, inputs, group, bias=None, fixed=True):
    """(layer, its weight in float64)."""
    codes, scale, zero = drawn(outputs, inputs, group)
    wide = (part.double().repeat_interleave(group, 1) for part in (scale, zero))
    layer = Int4Linear(*pack_int4([(codes, scale, zero)], outputs, inputs, group), outputs, bias, fixed)
    return layer, (codes.double() - 8) * next(wide) + next(wide)


def int8_layer(outputs, inputs, bias=None, fixed=True):
    generator = torch.Generator().manual_seed(outputs * inputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    codes, scales, *_ = pack_int8(row_parts(weight), outputs, inputs)
    return Int8Linear(codes, scales, bias, fixed), codes.double() * scales.double()[:, None]


def rows_of(count, inputs):
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).bfloat16()


@pytest.fixture
def exact(monkeypatch):
    """Many rows are multiplied in float32, as on CPUs without products in bfloat16."""
    monkeypatch.setattr(unpacked, "_dtype", lambda: torch.float32)


def assert_rounded(got, x, weight, bias=None):
    """The product is float64's up to the rounding to bfloat16, of the sum with the bias once more, and float32 sums."""
    want = x.double() @ weight.t()
    slack = ULP * want.abs() + 1e-5 * (x.double().abs() @ weight.abs().t())
    if bias is not None:
        want = want + bias.double()
        slack += ULP * want.abs()
    assert (((got.double() - want).abs() - slack) <= 0).all()


@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("outputs", [16, 17, 40, 96, 160])
@pytest.mark.parametrize("count", [1, 5, 200])
def test_an_int4_product_is_that_of_its_formula(exact, group, outputs, count):
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    for fixed in (False, True):
        layer, weight = int4_layer(outputs, 512, group, bias, fixed)
        x = rows_of(count, 512)
        assert_rounded(layer(x), x, weight, bias)
        layer.bias = None
        assert_rounded(layer(x), x, weight)


@pytest.mark.parametrize("outputs", [16, 17, 41, 160])
@pytest.mark.parametrize("inputs", [32, 96, 576])
@pytest.mark.parametrize("count", [1, 5, 200])
def test_an_int8_product_is_that_of_its_formula(exact, outputs, inputs, count):
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    for fixed in (False, True):
        layer, weight = int8_layer(outputs, inputs, bias, fixed)
        x = rows_of(count, inputs)
        assert_rounded(layer(x), x, weight, bias)


def test_leading_dims_stay_and_views_are_taken():
    layer, weight = int4_layer(48, 64, 32)
    x = rows_of(12, 128).view(2, 6, 128)[..., ::2]
    got = layer(x)
    assert got.shape == (2, 6, 48)
    assert_rounded(got.flatten(0, 1), x.flatten(0, 1), weight)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (192, 576), (576, 1536), (1040, 256)])
def test_a_row_has_the_same_bits_alone_and_in_company(kind, outputs, inputs):
    layer = (int4_layer(outputs, inputs, 32) if kind == "int4" else int8_layer(outputs, inputs))[0]
    x = rows_of(300, inputs)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = layer(x)
        for count in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 64, 100):
            for first in (0, 13, 200):
                assert torch.equal(layer(x[first : first + count]), want[first : first + count])
        torch.set_num_threads(2)
        assert torch.equal(layer(x), want)
        assert torch.equal(layer(x[:1]), want[:1])
    finally:
        torch.set_num_threads(threads)


def test_many_rows_are_multiplied_by_unpacked_weights_where_that_is_allowed(exact, monkeypatch):
    if not unpacked.takes_many():
        pytest.skip("the int4 layout of this CPU is not known")
    monkeypatch.setattr(unpacked, "_ELEMENTS", 64 * 128)  # several parts
    x = rows_of(unpacked.FEW_ROWS_INT4 + 1, 64)
    seen = []
    for name in ("many_rows_int4", "many_rows_int8"):
        real = getattr(packed, name)
        monkeypatch.setattr(packed, name, lambda *args, real=real: seen.append(real(*args)) or seen[-1])
    for fixed in (True, False):
        four, weight = int4_layer(272, 64, 32, fixed=fixed)
        assert_rounded(four(x), x, weight)
        eight, weight = int8_layer(272, 64, fixed=fixed)
        assert_rounded(eight(x), x, weight)
    assert [found.shape for found in seen] == [(len(x), 272)] * 2
    assert seen[0].dtype is torch.bfloat16
    few = int4_layer(272, 64, 32, fixed=False)[0](x[:4])
    assert seen[-1] is None
    assert torch.equal(few, int4_layer(272, 64, 32)[0](x[:4]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unpacked_weights_are_rounded_once(monkeypatch, dtype):
    """Rows of the identity show the weights."""
    if not unpacked.takes_many():
        pytest.skip("the int4 layout of this CPU is not known")
    monkeypatch.setattr(unpacked, "_dtype", lambda: dtype)
    layer, weight = int4_layer(96, 256, 64, fixed=False)
    assert torch.equal(layer(torch.eye(256).bfloat16()), weight.t().bfloat16())
    layer, weight = int8_layer(96, 256, fixed=False)
    assert torch.equal(layer(torch.eye(256).bfloat16()), weight.t().bfloat16())


@pytest.mark.parametrize(
    "layer_of", [lambda: int4_layer(96, 256, 32, fixed=False), lambda: int8_layer(96, 256, fixed=False)]
)
def test_products_with_unpacked_weights_in_bfloat16_lose_only_their_rounding(monkeypatch, layer_of):
    monkeypatch.setattr(unpacked, "_dtype", lambda: torch.bfloat16)
    (layer, weight), x = layer_of(), rows_of(150, 256)
    want = x.double() @ weight.t()
    assert (layer(x).double() - want).norm() < ULP * want.norm()


def test_parts_of_rows_are_packed_as_the_whole():
    codes, scale, zero = drawn(200, 96, 32)
    whole = pack_int4([(codes, scale, zero)], 200, 96, 32)
    parts = pack_int4(zip(codes.split(64), scale.split(64), zero.split(64)), 200, 96, 32)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts))
    assert sum(tensor.nbytes for tensor in whole) == int4_bytes(200, 96, 32)


def test_int8_codes_are_the_nearest_and_the_error_is_theirs():
    weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    codes, scales, lost, whole = pack_int8(weight.split(16), 37, 64)
    error = (lost / whole) ** 0.5
    assert (codes.nbytes + scales.nbytes) == int8_bytes(37, 64)
    held = codes.double() * scales.double()[:, None]
    assert error == pytest.approx(float((held - weight.double()).norm() / weight.double().norm()), rel=1e-5)
    assert 0.001 < error < 0.015
    # 127 steps reach a row's largest number unless its scale was rounded down.
    assert ((held - weight.double()).abs() <= scales.double()[:, None] * (0.5 + 127 * ULP)).all()
    assert pack_int8([torch.zeros(16, 32)], 16, 32)[2:] == (0, 0)


def test_an_embedding_returns_rows_of_codes_and_shares_them_with_a_head():
    weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    codes, scales, *_ = pack_int8([weight], 50, 64)
    ids = torch.tensor([[3, 0], [49, 3]])
    want = (codes.double() * scales.double()[:, None])[ids].to(torch.bfloat16)
    assert torch.equal(Int8Embedding(codes, scales, None)(ids), want)
    factor = torch.tensor(8.0, dtype=torch.bfloat16)
    assert torch.equal(Int8Embedding(codes, scales, factor)(ids), want * 8)


def test_what_the_products_cannot_read_is_known():
    """int8 rows of another length would be read beyond their end."""
    assert why_not_int8(64, 100) == "100 inputs, no multiple of 32"
    assert why_not_int8(64, 96) is why_not_int4(64, 96, 32) is None
    assert why_not_int4(64, 96, 64) == "96 inputs, no multiple of 64"
    assert why_not_int4(64, 96, 48) == "groups of 48"
    assert "fewer than 16" in why_not_int8(4, 96)
    assert "fewer than 16" in why_not_int4(4, 96, 32)


# --- rounding to int4 ---


def error_of(values, codes, scale, zero):
    wide = [part.double().repeat_interleave(32, 1) for part in (scale, zero)]
    return float(((codes.double() - 8) * wide[0] + wide[1] - values.double()).square().sum())


def test_groups_lose_less_than_by_their_extremes():
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    found = nearest_groups(values, 32)
    groups = values.unflatten(1, (-1, 32))
    low, high = groups.aminmax(dim=-1)
    step = (high - low) / 15
    plain = ((groups - low[..., None]) / step[..., None]).round().clamp(0, 15).flatten(1)
    limit = error_of(values, plain, step, low + 8 * step)
    assert error_of(values, *found) < 0.95 * limit
    assert found[0].max() == 15
    assert found[0].min() == 0


def test_groups_of_one_number_and_of_few_levels_are_kept():
    flat = torch.full((2, 32), 0.5)
    assert error_of(flat, *nearest_groups(flat, 32)) == 0
    assert error_of(0 * flat, *nearest_groups(0 * flat, 32)) == 0
    levels = torch.arange(16.0).repeat(2, 2) / 4
    assert error_of(levels, *nearest_groups(levels, 32)) < 1e-4


def test_a_module_that_is_packed_holds_no_gradient():
    layer = Int8Linear(*pack_int8([torch.ones(16, 32)], 16, 32)[:2], nn.Parameter(torch.ones(16)), True)
    assert [name for name, _ in layer.named_buffers()] == ["codes", "scales"]
