"""Launch parameters by format and head_dim, and what a target can do. Nothing is tuned at run time."""

from typing import Any, NamedTuple, Self

import torch

from lean.kernels.compiling import triton_version
from lean.kernels.layout import KVLayout

_TRITON = tuple(int(number) for number in (triton_version() or "0.0").split(".")[:2])


class Target(NamedTuple):
    """What code is compiled for: ``cuda`` with 80, 86, 90, ...; ``hip`` with gfx942, ...; ``interpreter`` on a CPU."""

    backend: str
    arch: int | str

    @classmethod
    def named(cls, architecture: str) -> Self:
        """From what compilers call a GPU: ``sm_86``, ``gfx942``."""
        number = architecture.removeprefix("sm_")
        return cls("hip", architecture) if number == architecture else cls("cuda", int(number))

    @property
    def widen(self) -> int:
        """`common.PACKED` where there is PTX, else `common.PORTABLE`."""
        return int(self.backend == "cuda")

    def widen_in_prefill(self, rows: int) -> int:
        """As `widen`; `common.PACKED_PURE` for 64 ``rows`` and more on sm_100 and sm_103 before Triton 3.9.

        There 64 rows are multiplied by tcgen05 instructions, and Triton does not compile a loop of them with PTX that
        must stay in its place. With fewer rows it would load V in narrower pieces if the PTX might move.
        """
        return 2 if self.has_early_tcgen05 and rows >= 64 else self.widen

    @property
    def has_early_tcgen05(self) -> bool:
        """sm_100 and sm_103, with a Triton before 3.9."""
        return self.backend == "cuda" and self.arch in (100, 103) and _TRITON < (3, 9)

    @property
    def is_rdna(self) -> bool:
        return self.backend == "hip" and str(self.arch).startswith("gfx1")

    @property
    def has_bf16(self) -> bool:
        """Turing and the interpreter (numpy) have no bf16 products."""
        return self.backend == "hip" or (self.backend == "cuda" and int(self.arch) >= 80)

    def options(
        self, num_warps: int, num_stages: int, fuse: bool = True, max_registers: int | None = None
    ) -> dict[str, Any]:
        """Compile options of one launch; ``fuse``: multiply-adds may be contracted."""
        if self.backend == "hip":
            num_stages = min(num_stages, 2)  # LDS holds one tile beside the one that is read
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fuse}
        return options if max_registers is None else options | {"maxnreg": max_registers}


LATENT_HEADS = 16  # most query heads of a program that attends to latent vectors


def latent_head_parts(num_q_heads: int) -> int:
    """Parts into which the query heads of latent attention are cut, so that a program's accumulator fits registers."""
    divisors = (parts for parts in range(1, num_q_heads + 1) if num_q_heads % parts == 0)
    return next(parts for parts in divisors if num_q_heads // parts <= LATENT_HEADS)


class DecodeParameters(NamedTuple):
    """tile, exact_tile: keys per step in the quantized and in the exact pool. split: keys per part. max_registers: of a
    thread; None leaves them to the assembler."""

    tile: int
    exact_tile: int
    split: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


class PrefillParameters(NamedTuple):
    """rows: tokens x query heads of a program; the others as in `DecodeParameters`."""

    rows: int
    tile: int
    exact_tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# Keys of a decode step x padded head_dim. A larger tile spreads what a step costs beside its bytes (addresses, the
# rescaling of the accumulator, barriers) over more of them; the bound is that two programs fit into the shared memory
# of a multiprocessor, where a step keeps one tile being read, one arriving, and V widened to fp16. 164 KiB and more:
# sm_80, sm_90, sm_100. 100 KiB: sm_86, sm_89, sm_120. 64 KiB: CDNA. On sm_75, for which Triton has no matrix
# instructions, and on RDNA registers are what a tile must fit into.
_LARGE = (80, 87, 90, 100, 103)


def _elements(wide: bool, target: Target) -> int:
    if target.backend == "cuda":
        elements = 16384 if target.arch in _LARGE else 4096 if target.arch == 75 else 8192
    else:
        elements = 4096 if target.is_rdna else 8192
    return elements // (4 if wide else 1)


def _padded(layout: KVLayout) -> int:
    return 1 << (max(layout.k_dim, layout.v_dim) - 1).bit_length()


def _wide(layout: KVLayout, dtype: torch.dtype) -> bool:
    """fp32 products: no matrix instructions, four times the bytes."""
    return dtype is torch.float32 or any(f.name == "fp32" for f in (layout.k_format, layout.v_format))


def decode_parameters(layout: KVLayout, dtype: torch.dtype, target: Target) -> DecodeParameters:
    """Tile sizes of the decode kernel.

    Four warps share the keys of a tile in Q x K and the columns of V in P x V, so no two warps read the same bytes.
    Three stages: the block table is loaded two steps ahead, K and V one step. With two programs per multiprocessor this
    keeps more bytes in flight than any of the GPUs needs. A part has 512 keys, 64 to 256 KiB: enough steps to hide the
    first one, and 4,096 tokens of 8 KV heads still give 64 programs. For the interpreter tiles are small, so that short
    tests have several.
    """
    if target.backend == "interpreter":
        return DecodeParameters(tile=64, exact_tile=32, split=256, num_warps=4, num_stages=3)
    if layout.v_in_k:
        return _latent_decode_parameters(layout, dtype, target)
    padded, wide = _padded(layout), _wide(layout, dtype)
    tile = max(16, min(128, _elements(wide, target) // padded))
    exact_tile = 16 if padded > 64 else 32
    num_warps = 8 if target.is_rdna else 4
    registers = _decode_registers(layout, target)
    return DecodeParameters(tile, exact_tile, 512, num_warps, num_stages=3, max_registers=registers)


def _latent_decode_parameters(layout: KVLayout, dtype: torch.dtype, target: Target) -> DecodeParameters:
    """Of latent vectors, whose V fills registers: 16 rows x 512 numbers of an accumulator beside the query's.

    A tile of 16 keys, one being read and one arriving, beside the query's 36 KiB: 61 KiB of shared memory at most.
    """
    return DecodeParameters(tile=16, exact_tile=16, split=512, num_warps=4, num_stages=2)


def _decode_registers(layout: KVLayout, target: Target) -> int | None:
    """Registers of a thread of `decode`, of which four warps make a program.

    Left alone, the assembler spills a few values for the sake of one more program per multiprocessor; for which formats
    differs from release to release. Where shared memory holds only two programs, they may have all registers; of int4
    alone three fit. With more shared memory those that would spill get the registers of three programs, or of two where
    these do not do: mixed formats, and fp8 from sm_90 on. There Triton 3.6 spills with a limit, and not without one.
    """
    k, v = layout.k_format.name, layout.v_format.name
    if target.backend != "cuda" or target.arch == 75:
        return None
    if target.arch not in _LARGE:
        return None if k == v == "int4" else 255
    if k != v:
        return 168 if _padded(layout) <= 64 else 255
    spills = k == "fp8" and int(target.arch) >= 90 and _padded(layout) <= 128 and _TRITON != (3, 6)
    return 168 if spills else None


def prefill_parameters(layout: KVLayout, dtype: torch.dtype, group: int, target: Target) -> PrefillParameters:
    """Tile sizes of the prefill kernel.

    64 rows, one warp per 16 rows, so a softmax stays in one warp. At head_dim 128 registers run out: 8-bit and raw
    formats take eight warps; formats of fewer bits, which widen more codes at once, take half the rows. Beyond 128 both
    apply. A tile has the fewest keys that give every thread 16 bytes to load, since the rows share the cost of a step.
    CDNA spills with 64 keys; sm_80 to sm_89 with Triton 3.6 at head_dim 64, where 32 exact keys follow 8-bit ones;
    sm_100 with Triton 3.7 at head_dim 256, where raw formats have three stages.
    """
    if layout.v_in_k and target.backend != "interpreter":  # with four warps quantized formats spill 8 bytes
        num_warps = 8 if layout.k_format.quantized else 4
        return PrefillParameters(rows=16, tile=16, exact_tile=16, num_warps=num_warps, num_stages=2)
    padded, wide = _padded(layout), _wide(layout, dtype)
    low_bits = min(layout.k_format.bits, layout.v_format.bits) < 8
    few_rows = padded > 128 or (padded > 64 and low_bits)
    rows = max(32 if few_rows else 64, 1 << (group - 1).bit_length())
    if target.backend == "interpreter":
        return PrefillParameters(rows, tile=64, exact_tile=32, num_warps=4, num_stages=3)
    tile = 64 if padded <= 64 or (padded <= 128 and low_bits and target.backend == "cuda") else 32
    num_warps = 8 if padded > (128 if low_bits else 64) else 4
    up_to_ada = target.backend == "cuda" and 75 < int(target.arch) < 90
    exact_tile = 16 if padded > 64 or (_TRITON == (3, 6) and up_to_ada and layout.k_format.bits == 8) else 32
    num_stages = 2 if padded > 128 and target.has_early_tcgen05 and not layout.k_format.quantized else 3
    registers = _prefill_registers(layout, target)
    return PrefillParameters(rows, 16 if wide else tile, exact_tile, num_warps, num_stages, registers)


def _prefill_registers(layout: KVLayout, target: Target) -> int | None:
    """Registers of a thread of `prefill`. Left alone, the assembler spills 8 bytes on sm_100 at head_dim 64: of int8
    with Triton 3.7, of int4 with 3.6."""
    if not target.has_early_tcgen05 or _padded(layout) > 64:
        return None
    return {("int8", "int8"): 255, ("int4", "int4"): 168}.get((layout.k_format.name, layout.v_format.name))
