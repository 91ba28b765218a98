"""How faithful a cache is: KL divergence and agreement against another engine on the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lean.engine import LLM
from lean.runner import LOGIT_SLICE


@dataclass(frozen=True)
class Fidelity:
    """Per token: natural-log KL(reference || candidate); over all tokens: agreement of the likeliest token.

    ``perplexity`` is the candidate's, over tokens 1 .. n - 1.
    """

    num_tokens: int
    perplexity: float
    mean_kld: float
    stderr_kld: float
    median_kld: float
    p999_kld: float
    top1: float


@torch.inference_mode()
def compare(reference: LLM, candidate: LLM, token_ids: Sequence[int]) -> Fidelity:
    """Score the same tokens through both engines, chunk by chunk; logits exist for LOGIT_SLICE rows at once.

    Both need the same prefill chunk and max_num_batched_tokens, so that their chunks coincide.
    """
    targets = torch.tensor(list(token_ids))
    klds, agreed, scores = [], [], []
    chunks = zip(reference.hidden_states(token_ids), candidate.hidden_states(token_ids), strict=True)
    for (position, ref_rows), (other_position, rows) in chunks:
        if (position, ref_rows.shape) != (other_position, rows.shape):
            raise ValueError("the engines cut the tokens differently: give both the same prefill chunk")
        for start in range(0, rows.shape[0], LOGIT_SLICE):
            part = slice(start, start + LOGIT_SLICE)
            p = reference.logits(ref_rows[part]).log_softmax(-1)
            q = candidate.logits(rows[part]).log_softmax(-1)
            klds.append((p.exp() * (p - q)).sum(-1).cpu())
            agreed.append((p.argmax(-1) == q.argmax(-1)).cpu())
            first = position + start + 1
            wanted = targets[first : first + q.shape[0]].to(q.device)
            scores.append(q[: wanted.shape[0]].gather(1, wanted[:, None])[:, 0].cpu())
    kld = torch.cat(klds).double()
    return Fidelity(
        num_tokens=kld.numel(),
        perplexity=float(torch.cat(scores).double().mean().neg().exp()),
        mean_kld=float(kld.mean()),
        stderr_kld=float(kld.std() / kld.numel() ** 0.5),
        median_kld=float(kld.median()),
        p999_kld=float(kld.quantile(0.999)),
        top1=float(torch.cat(agreed).double().mean()),
    )
