"""Tensors of a GGUF file as numbers. The seam: name -> (type, shape, raw bytes) -> dequantized rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, BinaryIO

from lean.errors import ModelError, one_line
from lean.store.gguf.header import GgufTensor

if TYPE_CHECKING:
    import numpy as np
    import torch

CHUNK = 1 << 20  # elements that are dequantized at a time; in float32 4 MiB
F64 = 28


def raw_rows(tensor: GgufTensor, rows_at_once: int, span: tuple[int, int] | None = None) -> Iterator[np.ndarray]:
    """The encoded bytes, uint8 [rows, bytes per row], at most ``rows_at_once`` rows at a time.

    ``span``: the first row, and the one behind the last; None: all.
    """
    import numpy as np

    rows = math.prod(tensor.shape[:-1])
    width = tensor.nbytes // rows
    first, end = span or (0, rows)
    try:
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset + first * width)
            for start in range(first, end, rows_at_once):
                count = min(rows_at_once, end - start)
                data = _read(stream, count * width)
                if len(data) != count * width:
                    raise ModelError(f"{tensor.file.name} became shorter while it was read")
                yield np.frombuffer(data, np.uint8).reshape(count, width)
    except OSError as error:
        raise ModelError(f"cannot read {tensor.file}: {error.strerror or error}") from error


def _read(stream: BinaryIO, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count and (got := stream.readinto(view[done:])):  # type: ignore[attr-defined]
        done += got
    return data if done == count else data[:done]


def ordered_rows(
    tensor: GgufTensor, rows_at_once: int, order: np.ndarray | None = None, span: tuple[int, int] | None = None
) -> Iterator[np.ndarray]:
    """`raw_rows`, or all rows in another order: ``order`` says which row of the file each row is.

    All bytes of the tensor are held then.
    """
    if order is None:
        yield from raw_rows(tensor, rows_at_once, span)
        return
    [whole] = raw_rows(tensor, len(order))
    for start in range(0, len(order), rows_at_once):
        yield whole[order[start : start + rows_at_once]]


def decoded_rows(
    tensor: GgufTensor, rows_at_once: int, order: np.ndarray | None = None, span: tuple[int, int] | None = None
) -> Iterator[torch.Tensor]:
    """The numbers of a tensor, float32 (float64 of an F64 tensor) [rows, columns], part by part; see `ordered_rows`.

    Raises:
        ModelError: the file cannot be read, or the gguf package cannot decode the tensor's type.
    """
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as decode

    require_decoder(tensor)
    for raw in ordered_rows(tensor, rows_at_once, order, span):
        values = raw.view(np.float64) if tensor.type == F64 else decode(raw, GGMLQuantizationType(tensor.type))
        yield torch.from_numpy(np.ascontiguousarray(values).reshape(len(raw), tensor.shape[-1]))


def dequantize(tensor: GgufTensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of a tensor in ``dtype``, [*shape]; a part of its rows is held in float32 at a time.

    Raises:
        ModelError: the file cannot be read, or the gguf package cannot decode the tensor's type.
    """
    import torch

    columns = tensor.shape[-1]
    out = torch.empty(math.prod(tensor.shape[:-1]), columns, dtype=dtype)
    start = 0
    for values in decoded_rows(tensor, max(1, CHUNK // columns)):
        out[start : start + len(values)] = values
        start += len(values)
    return out.reshape(tensor.shape)


def require_decoder(tensor: GgufTensor) -> None:
    """Raise ModelError where the gguf package knows a tensor's type, and cannot turn it into numbers."""
    if not _can_decode(tensor.type):
        raise ModelError(
            f"{tensor.file.name}: tensor {one_line(tensor.name, 80)} has type {tensor.type_name}, which "
            f"gguf {installed_version('gguf')} cannot turn into numbers: take a file in another quantization"
        )


@cache
def _can_decode(kind: int) -> bool:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize as decode

    if kind == F64:
        return True
    try:
        decode(np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType(kind)][1]), np.uint8), GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True
