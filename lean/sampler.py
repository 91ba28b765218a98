"""From logits to a token id."""

import torch

from lean.request import SamplingParams


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator | None) -> int:
    """Choose one id. ``logits``: float32 [vocab], rows of padding at -inf. Greedy takes the lowest id among ties.

    Top-k and top-p look at the tempered distribution, as transformers and vLLM do; top-k keeps all ties of the k-th.
    """
    if not params.temperature or generator is None:
        return int(logits.argmax())
    # Subtract the maximum first: a tiny temperature then gives -inf and 0, never inf - inf.
    scaled = (logits.double() - logits.max().double()) / params.temperature
    if params.top_k and params.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -torch.inf)
    probs = torch.softmax(scaled, dim=-1)
    if params.top_p is not None and params.top_p < 1:
        ordered, order = probs.sort(descending=True, stable=True)
        beyond = ordered.cumsum(0) - ordered >= params.top_p
        probs = probs.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), 0.0)
    # Inverse transform on one uniform number: independent of vocabulary padding and of torch's multinomial.
    cumulative = probs.cumsum(0)
    draw = torch.rand((), dtype=torch.float64, generator=generator).to(probs.device) * cumulative[-1]
    choice = int(torch.searchsorted(cumulative, draw, right=True))
    return choice if choice < probs.numel() else int(probs.nonzero()[-1])
