"""A kernel launch that is not yet made, and how tensors and formats are written for the kernels.

`plan_kv_write` and `plan_attention` plan the launches of the two ops. Grids follow from shapes alone (rows, sequences,
width of the block tables), so that a step can be captured into a CUDA graph; no launch depends on a value in device
memory.
"""

import math
from typing import Any, NamedTuple

import torch

from lean.kernels.triton.common import FORMAT_CODES
from lean.kernels.triton.failures import explain
from lean.quant import Kind, KVFormat
from lean.quant.formats import UNIT, rotation_size


class Launch(NamedTuple):
    """One kernel launch, not yet made."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        """Launch the kernel; its first launch compiles it. Raises KernelError where that fails."""
        try:
            self.kernel[self.grid](**self.arguments, **self.options)
        except Exception as error:
            failure = explain(error, self.kernel.__name__)
            if failure is None:
                raise
            raise failure from error


class Rotation(NamedTuple):
    """The butterfly of the kernels' `common.rotate`: 2^strides dims in a block, and the last factor; (0, 1): none."""

    strides: int
    factor: float


NO_ROTATION = Rotation(0, 1.0)


def lacking(
    k_format: KVFormat, v_format: KVFormat, k_dim: int, v_dim: int, dtype: torch.dtype, v_in_k: bool = False
) -> str | None:
    """Why these kernels cannot serve a layer with these formats, head dims and queries, or None."""
    if dtype is torch.float64:
        return "float64 has no GPU kernel"
    for fmt, dim in ((k_format, k_dim), (v_format, v_dim)):
        if fmt.name not in FORMAT_CODES:
            return f"{fmt.name} has no GPU kernel"
        if fmt.kind is Kind.GRID and dim % UNIT:
            return f"{fmt.name} with head_dim {dim}, which is no multiple of {UNIT}, has no GPU kernel"
    if v_in_k and v_dim <= 512 and 0 < k_dim - v_dim <= 128:
        return None
    if max(k_dim, v_dim) > 256:
        return f"head_dim {max(k_dim, v_dim)} is more than the GPU kernels' 256"
    return None


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """bf16 as its int16 bits, see `common.load_float`; other dtypes as they are."""
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def contiguous_dims(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the elements of a vector next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rotation_of(fmt: KVFormat, dim: int) -> Rotation:
    if not fmt.rotate:
        return NO_ROTATION
    size = rotation_size(dim)
    return Rotation(size.bit_length() - 1, 1.0 / math.sqrt(size))


def padded(dim: int) -> int:
    """The width of a tile that holds vectors of ``dim`` elements: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def base_of(arena: torch.Tensor, offset: int) -> torch.Tensor:
    """The arena from the layer's part of block 0 on; its data pointer keeps the alignment of 16 bytes."""
    return arena.view(-1)[offset:] if arena.is_contiguous() else arena[0, offset:]


def vectors_per_program(dim: int) -> int:
    """Vectors of ``dim`` elements that one program encodes or rotates: about 2,048 elements, 16 for each thread.

    A butterfly needs twice as many registers.
    """
    return max(1, 2048 // padded(dim))
