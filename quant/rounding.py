"""Weights that come unquantized, rounded to int4: groups of inputs with a scale and a zero that lose the least."""

import torch

_MOST, _SHRINKS = 15, (1.0, 0.95, 0.9, 0.85, 0.8, 0.72)


def nearest_groups(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [rows, in] uint8, scales, zeros [rows, in / group] bfloat16) of float32 rows: w = (code - 8) scale + zero.

    The range that a group's codes span is shrunk step by step about its middle. For each range the scale and the zero
    that fit the codes best are found by least squares. The one with the smallest squared error is kept.
    """
    w = values.unflatten(1, (-1, group))
    low, high = w.aminmax(dim=-1, keepdim=True)
    middle, span = (low + high) / 2, high - low
    best = torch.full_like(middle, torch.inf)
    scale, zero = torch.zeros_like(middle), middle.clone()
    for shrink in _SHRINKS:
        own = (span * (shrink / _MOST)).clamp(min=torch.finfo(torch.float32).tiny)
        codes = _codes(w, own, middle + own / 2)
        mean, target = codes.mean(-1, keepdim=True), w.mean(-1, keepdim=True)
        spread = (codes - mean).square().sum(-1, keepdim=True)
        fit = ((codes - mean) * (w - target)).sum(-1, keepdim=True) / spread.clamp(min=1)
        fit = torch.where(spread > 0, fit, own).bfloat16().float()
        offset = (target - fit * mean).bfloat16().float()
        error = (_codes(w, fit, offset) * fit + offset - w).square().sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scale, zero = torch.where(better, fit, scale), torch.where(better, offset, zero)
    codes = _codes(w, scale, zero) + 8
    return codes.to(torch.uint8).flatten(1), scale[..., 0].bfloat16(), zero[..., 0].bfloat16()


def _codes(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The nearest codes, less 8."""
    codes = ((w - zero) / torch.where(scale == 0, 1, scale)).round_().clamp_(-8, _MOST - 8)
    return codes
