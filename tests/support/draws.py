"""Draws of a sampler, and checks of their counts."""

import math

import numpy as np
import torch

from lean.engine.host import read
from lean.engine.logprobs import TokenLogprob, measure
from lean.engine.logprobs import token_logprobs as read_logprobs
from lean.engine.sampler import Sampler
from lean.engine.sampling import Turn, sample
from lean.sampling_params import SamplingParams

LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0, 2.75, -0.5, 1.5])
EVERYTHING = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3} | {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {0: 1.5, 3: -1.0},
}


class Lone(Sampler):
    """A sampler that draws alone."""

    def sample(self, logits: torch.Tensor) -> int:
        [found], _ = sample(logits[None], [Turn(self, 0)])
        return found.token


def make(prompt=(), index=0, **params) -> Lone:
    return Lone(SamplingParams(**{"temperature": 1.0, "seed": 0, **params}), prompt, index)


def draws(logits, count, prompt=(), index=0, **params) -> list[int]:
    sampler = make(prompt, index, **params)
    return [sampler.sample(logits) for _ in range(count)]


def token_logprobs(logits: torch.Tensor, ids: list[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of one token per row, and of the row's most likely ones."""
    return read_measured(measure(logits, torch.tensor(ids, dtype=torch.long), top), top)


def read_measured(measured: torch.Tensor, top: int) -> list[TokenLogprob]:
    """What `measure` returned, as the host reads it."""
    return read_logprobs(read([measured])[0], top)


def force(sampler, ids, vocab) -> None:
    """Make the sampler choose these ids: each is the only possible one."""
    for token in ids:
        only = torch.full((vocab,), -math.inf)
        only[token] = 0.0
        assert sampler.sample(only) == token


class Numbers:
    """Replaces random.Random: returns the given numbers in turn, then the last one again and again."""

    def __init__(self, *numbers):
        self._numbers = list(numbers)

    def random(self):
        return self._numbers.pop(0) if len(self._numbers) > 1 else self._numbers[0]


def counts(logits, points, prompt=(), output=(), **params) -> np.ndarray:
    """How often each id is drawn after ``output``, with evenly spaced numbers from 0 to 1 in place of random ones."""
    found = np.zeros(len(logits))
    stateless = not {"repetition_penalty", "presence_penalty", "frequency_penalty"} & params.keys()
    sampler = None
    for point in range(points):
        if sampler is None or not stateless:
            sampler = make(prompt, **params)
            force(sampler, output, len(logits))
        sampler._random = Numbers((point + 0.5) / points)
        found[sampler.sample(logits)] += 1
    return found


def assert_evenly(found: np.ndarray, probs) -> None:
    """Each id was drawn as often as its probability demands, to within one draw; ids of probability 0 never."""
    probs = np.asarray(probs, dtype=np.float64)
    assert not found[probs == 0].any()
    assert np.abs(found - probs * found.sum()).max() <= 1 + 1e-6


def assert_follows(found: list[int], probs) -> None:
    """The counts of random draws pass a chi-square test with a wide margin; ids of probability 0 never occur."""
    probs = np.asarray(probs, dtype=np.float64)
    seen = np.bincount(found, minlength=len(probs))
    assert not seen[probs == 0].any()
    expected = probs[probs > 0] * len(found)
    chi_square = ((seen[probs > 0] - expected) ** 2 / expected).sum()
    freedom = max(1, len(expected) - 1)
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom)
