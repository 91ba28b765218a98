"""One projection of all experts of a layer in 4 or 8 bits, each expert packed for itself."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from lean.quant.packed import OUTPUTS, int4_product, int8_product
from lean.quant.unpacked import takes_many


class PackedExperts(nn.Module):
    """Weights [experts, outputs, inputs] as codes and scales; a product is one expert's.

    Args:
        parts: codes and scales of each expert, as `lean.quant.packed.pack_int4` or `pack_int8` returns them. Each pair
            is copied before the next one is asked for.
        fixed: compute any number of rows in the same way, so that a row's bits do not depend on their number.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(
        self,
        kind: Literal["int4", "int8"],
        parts: Iterable[tuple[torch.Tensor, torch.Tensor]],
        shape: tuple[int, int, int],
        fixed: bool,
    ) -> None:
        super().__init__()
        self.kind, self.shape = kind, torch.Size(shape)
        experts, outputs, inputs = shape
        codes = scales = torch.empty(0)
        for expert, (code, scale) in enumerate(parts):
            if not expert:
                codes = torch.empty(experts, *code.shape, dtype=code.dtype)
                scales = torch.empty(experts, *scale.shape, dtype=scale.dtype)
            codes[expert], scales[expert] = code, scale
        assert codes.shape[1] == (outputs if kind == "int8" else outputs + -outputs % OUTPUTS)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.group = inputs // scales.shape[1] if kind == "int4" else inputs
        self._may_unpack = not fixed and takes_many()

    def product(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] times the weight of one expert -> [rows, outputs], of x's dtype."""
        rows, codes, scales = x.to(torch.bfloat16).contiguous(), self.codes[expert], self.scales[expert]
        if self.kind == "int8":
            return int8_product(rows, codes, scales, self._may_unpack).to(x.dtype)
        out = int4_product(rows, codes, self.group, scales, self._may_unpack)
        return out[:, : self.shape[1]].to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.kind}, experts={self.shape[0]}, in_features={self.shape[2]}, out_features={self.shape[1]}"
