"""Codes, scales and zeros of 4-bit blocks are the numbers of the gguf package."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from lean.store.gguf.groups import GROUP, GROUPED, grouped_rows
from lean.store.gguf.header import GgufTensor
from lean.store.gguf.tensors import decoded_rows, dequantize

KINDS = sorted(GGMLQuantizationType(kind).name for kind in GROUPED)
ROWS, COLUMNS = 70, 512


@pytest.fixture(params=KINDS)
def tensor(request, tmp_path):
    """A tensor of random bytes, with scales that are finite numbers of both signs."""
    kind = GGMLQuantizationType[request.param]
    columns, width = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (ROWS, COLUMNS // columns, width), dtype=np.uint8)
    scales = 1 if kind == GGMLQuantizationType.Q4_0 else 2
    blocks[..., : 2 * scales] = random.normal(0, 1, (*blocks.shape[:2], scales)).astype(np.float16).view(np.uint8)
    file = tmp_path / "tensor"
    file.write_bytes(b"before" + blocks.tobytes())
    return GgufTensor("t", (ROWS, COLUMNS), kind.value, file, 6, blocks.nbytes)


def numbers(parts):
    codes, scale, zero = (torch.cat(list(column)) for column in zip(*parts))
    assert codes.dtype is torch.uint8
    assert int(codes.max()) == 15
    wide = [part.double().repeat_interleave(GROUP, 1) for part in (scale, zero)]
    return (codes.double() - 8) * wide[0] + wide[1]


def test_they_stand_for_the_numbers_of_the_gguf_package(tensor):
    raw = np.frombuffer(tensor.file.read_bytes()[6:], np.uint8).reshape(ROWS, -1)
    want = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType(tensor.type))).double()
    parts = list(grouped_rows(tensor, 32))
    assert [len(part[0]) for part in parts] == [32, 32, 6]
    assert (numbers(parts) - want).abs().max() <= 1e-6 * want.abs().max()
    assert torch.equal(dequantize(tensor, torch.float32).double(), want)


def test_rows_come_in_the_order_that_is_asked_for(tensor):
    order = np.random.default_rng(1).permutation(ROWS)
    want = numbers(grouped_rows(tensor, ROWS))[order]
    assert torch.equal(numbers(grouped_rows(tensor, 32, order)), want)
    decoded = torch.cat(list(decoded_rows(tensor, 32, order)))
    assert torch.equal(decoded, dequantize(tensor, torch.float32)[order])
