"""Tensors of a GGUF file in groups of 32 codes of 4 bits: codes, scales and offsets as they are stored.

w = (code - 8) x scale + zero, in the layout of the blocks of `ggml-common.h`, https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lean.store.gguf.header import GgufTensor
from lean.store.gguf.tensors import ordered_rows

if TYPE_CHECKING:
    import numpy as np
    import torch

GROUP = 32
Q4_0, Q4_1, Q4_K = 2, 3, 12
GROUPED = (Q4_0, Q4_1, Q4_K)
UNQUANTIZED = (0, 1, 28, 30)  # F32, F16, F64, BF16


def grouped_rows(
    tensor: GgufTensor, rows_at_once: int, order: np.ndarray | None = None, span: tuple[int, int] | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(codes [rows, columns] uint8, scales, zeros [rows, columns / 32] float32) of a matrix, part by part.

    ``order``, ``span``: see `ordered_rows`.

    Raises:
        ModelError: the file cannot be read.
    """
    decode = {Q4_0: _q4_0, Q4_1: _q4_1, Q4_K: _q4_k}[tensor.type]
    for raw in ordered_rows(tensor, rows_at_once, order, span):
        codes, scale, zero = decode(raw)
        yield _torch(codes), _torch(scale), _torch(zero)


def _torch(array: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)


def _halves(blocks: np.ndarray) -> np.ndarray:
    """uint8 [..., n] -> [..., 2, n]: the low halves of the bytes, then the high ones."""
    import numpy as np

    return np.stack([blocks & 15, blocks >> 4], axis=-2)


def _float(blocks: np.ndarray) -> np.ndarray:
    """float16 numbers of two bytes each, [..., 2 n] uint8 -> [..., n] float32."""
    import numpy as np

    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _q4_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks: scale d, then 16 bytes with codes 0 to 15 in the low and 16 to 31 in the high halves. d x (code - 8)."""
    blocks = raw.reshape(len(raw), -1, 18)
    scale = _float(blocks[..., :2])[..., 0]
    return _halves(blocks[..., 2:]).reshape(len(raw), -1), scale, 0 * scale


def _q4_1(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As Q4_0, with an offset m after the scale: d x code + m."""
    blocks = raw.reshape(len(raw), -1, 20)
    scale, offset = _float(blocks[..., :2])[..., 0], _float(blocks[..., 2:4])[..., 0]
    return _halves(blocks[..., 4:]).reshape(len(raw), -1), scale, offset + 8 * scale


def _q4_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of 8 groups: d, dmin, 6 bits of scale s and offset m for each group, the codes. d x s x code - dmin x m.

    The 12 bytes of s and m: four with s 0 to 3, four with m 0 to 3, in their low 6 bits; four with the low halves of s
    and m 4 to 7, whose upper two bits are those of the first eight bytes.
    """
    import numpy as np

    blocks = raw.reshape(len(raw), -1, 144)
    d, dmin = _float(blocks[..., :2]), _float(blocks[..., 2:4])
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    s = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1).astype(np.float32)
    m = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1).astype(np.float32)
    codes = _halves(blocks[..., 16:].reshape(len(raw), -1, 4, 32))  # 32 bytes hold two groups
    scale, offset = d * s, dmin * m
    return codes.reshape(len(raw), -1), scale.reshape(len(raw), -1), (8 * scale - offset).reshape(len(raw), -1)
