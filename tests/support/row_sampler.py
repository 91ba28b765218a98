"""The draw of one row, as its definition reads: ids that are dropped leave the tensors. The batched one equals it."""

import torch

from lean.sampling_params import SamplingParams


def draw_row(scores: torch.Tensor, params: SamplingParams, number: float) -> int:
    """A token id for ``scores``, float32 or float64 [vocab], with bias and penalties applied; 0 <= ``number`` < 1."""
    if not params.temperature:
        return int(scores.argmax())
    scaled = (scores.double() - scores.max().double()) / params.temperature
    possible = scaled > -torch.inf
    if params.top_k and params.top_k < scaled.numel():
        possible &= scores >= scores.topk(params.top_k).values[-1]
    ids = possible.nonzero()[:, 0]
    probs = torch.softmax(scaled[ids], dim=-1)
    if params.top_p is not None and params.top_p < 1:
        ordered, order = probs.sort(descending=True, stable=True)
        within = ordered.cumsum(0) - ordered < params.top_p
        kept = torch.zeros_like(within).scatter_(0, order, within)
        ids, probs = ids[kept], probs[kept]
    kept = (probs >= (params.min_p or 0) * probs.max()) & (probs > 0)
    ids, probs = ids[kept], probs[kept]
    cumulative = probs.cumsum(0)
    return int(ids[torch.searchsorted(cumulative, cumulative[-1] * number, right=True)])
