"""Launch parameters: one table by format and head_dim, and what a target can do. Nothing is tuned at run time."""

from typing import Any, NamedTuple

import torch

from lean.kernels.layout import KVLayout


class Target(NamedTuple):
    """What code is made for: ``cuda`` with 80, 86, 90, ...; ``hip`` with gfx942, ...; ``interpreter`` on a CPU."""

    backend: str
    arch: int | str

    @property
    def widen(self) -> int:
        """How codes are widened, see `common`: hardware e4m3 is there from sm_89 on."""
        if self.backend != "cuda":
            return 0
        return 2 if int(self.arch) >= 89 else 1

    @property
    def has_bf16(self) -> bool:
        """Turing has no bf16 products, nor has the interpreter (numpy)."""
        return self.backend == "hip" or (self.backend == "cuda" and int(self.arch) >= 80)

    def options(self, num_warps: int, num_stages: int) -> dict[str, Any]:
        """Compile options of one launch."""
        if self.backend == "hip":
            num_stages = min(num_stages, 2)  # LDS holds one tile beside the one that is read
        return {"num_warps": num_warps, "num_stages": num_stages}


class DecodeParameters(NamedTuple):
    tile: int
    exact_tile: int
    split: int
    num_warps: int
    num_stages: int


class PrefillParameters(NamedTuple):
    rows: int
    tile: int
    exact_tile: int
    num_warps: int
    num_stages: int


def decode_parameters(layout: KVLayout, dtype: torch.dtype, target: Target) -> DecodeParameters:
    return DecodeParameters(64, 32, 512, 4, 3)


def prefill_parameters(layout: KVLayout, dtype: torch.dtype, group: int, target: Target) -> PrefillParameters:
    rows = max(64, 1 << (group - 1).bit_length())
    return PrefillParameters(rows, 64, 32, 4, 2)
