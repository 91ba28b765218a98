"""Seeds: the same request gets the same draws, different requests get independent ones."""

import math

import numpy as np
import torch
from draws import LOGITS, assert_follows, draws, make

from lean.engine import sampler as module

FLAT = torch.zeros(64)


def assert_independent(streams: list[list[int]]) -> None:
    """Streams of draws from FLAT: each uniform, and any two equal at a step as often as by chance."""
    assert len({tuple(stream) for stream in streams}) == len(streams)
    assert_follows([token for stream in streams for token in stream], np.full(64, 1 / 64))
    table = np.array(streams)
    pairs = len(streams) * (len(streams) - 1) / 2
    equal = sum((np.bincount(step) * (np.bincount(step) - 1) / 2).sum() for step in table.T)
    trials = pairs * table.shape[1]
    assert abs(equal - trials / 64) < 5 * math.sqrt(trials / 64)


def test_a_hundred_prompts_with_one_seed_get_independent_noise():
    assert_independent([draws(FLAT, 20, [5, 6, i], seed=42) for i in range(100)])
    assert_independent([draws(FLAT, 20, [7] * i, seed=42) for i in range(100)])


def test_siblings_of_one_prompt_get_independent_noise():
    assert_independent([draws(FLAT, 20, [5, 6], index, seed=42) for index in range(100)])


def test_seeds_get_independent_noise_and_all_their_bits_count():
    assert_independent([draws(FLAT, 20, [5, 6], seed=seed) for seed in range(100)])
    assert_independent([draws(FLAT, 20, [5, 6], seed=1 + (i << 32)) for i in range(100)])


def test_seed_index_and_prompt_are_distinguished():
    streams = [(1, 1, [1]), (11, 1, []), (1, 11, []), (1, 1, [1, 1]), (1, 1, [11]), (1, 0, [1]), (0, 1, [1])]
    assert len({tuple(draws(FLAT, 10, ids, index, seed=seed)) for seed, index, ids in streams}) == len(streams)


def test_the_same_prompt_and_seed_get_the_same_draws_beside_any_others():
    alone = draws(FLAT, 50, [1, 2, 3], seed=42)
    for neighbour in ({"seed": None}, {"seed": 42}, {"temperature": 0}):
        first, other, again = make([1, 2, 3], seed=42), make([9], **neighbour), make((1, 2, 3), seed=42)
        found = []
        for _ in range(50):
            other.sample(FLAT)
            torch.rand(3)
            found.append((again.sample(FLAT), first.sample(FLAT)))
        assert found == [(token, token) for token in alone]


def test_without_a_seed_every_sampler_draws_its_own():
    assert len({tuple(draws(FLAT, 20, [5, 6], seed=None)) for _ in range(50)}) == 50


def test_greedy_needs_no_random_number(monkeypatch):
    monkeypatch.setattr(module, "random", None)
    monkeypatch.setattr(module, "secrets", None)
    assert draws(LOGITS, 3, temperature=0, seed=None) == [1, 1, 1]
