"""The distribution of the next token: by the definitions, and by transformers."""

import math

import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lean.sampling_params import SamplingParams


class AtTheEdge(Exception):
    """A probability is so close to a bound that rounding decides on which side it lies."""


def formula(logits, prompt, output, params: SamplingParams) -> list[float]:
    """Probabilities of the next id, from the definitions."""
    scores = [float(x) for x in logits]
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in {*prompt, *output}:
        r = params.repetition_penalty or 1
        scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    best = max(scores)
    weights = [math.exp((x - best) / params.temperature) for x in scores]

    def normal(kept):
        total = sum(weights[i] for i in kept)
        return {i: weights[i] / total for i in kept}

    kept = [i for i, weight in enumerate(weights) if weight > 0]
    if params.top_k and params.top_k < len(scores):
        kth = sorted(scores, reverse=True)[params.top_k - 1]
        kept = [i for i in kept if scores[i] >= kth]
    if params.top_p is not None and params.top_p < 1:
        probs, before, nucleus = normal(kept), 0.0, []
        for i in sorted(kept, key=lambda i: (-probs[i], i)):
            if abs(before - params.top_p) < 1e-9:
                raise AtTheEdge
            if before < params.top_p:
                nucleus.append(i)
            before += probs[i]
        kept = nucleus
    if params.min_p:
        probs = normal(kept)
        least = params.min_p * max(probs.values())
        if any(abs(p - least) < 1e-9 and p != max(probs.values()) for p in probs.values()):
            raise AtTheEdge
        kept = [i for i in kept if probs[i] >= least]
    probs = normal(kept)
    return [probs.get(i, 0.0) for i in range(len(scores))]


def with_transformers(logits, prompt, output, params: SamplingParams) -> list[float]:
    ids = torch.tensor([[*prompt, *output]], dtype=torch.long)
    scores = torch.as_tensor(logits, dtype=torch.float64)[None].clone()
    if params.repetition_penalty:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(float(params.temperature))(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p is not None:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p is not None:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return torch.softmax(scores[0], -1).tolist()
