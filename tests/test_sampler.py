"""From logits to one id: greedy without surprises, and draws that follow the distribution asked for."""

import math

import pytest
import torch

from lean.request import SamplingParams
from lean.sampler import sample

DRAWS = 4000
LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0, 2.75, -0.5, 1.5])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(logits: torch.Tensor, count: int = DRAWS, seed: int = 0, **params) -> list[int]:
    params = SamplingParams(**{"temperature": 1.0, **params})
    random = generator(seed)
    return [sample(logits, params, random) for _ in range(count)]


def assert_follows(found: list[int], probs: torch.Tensor) -> None:
    """Chi-square of the counts, far out in its tail; ids without probability never occur."""
    counts = torch.bincount(torch.tensor(found), minlength=len(probs)).double()
    assert not counts[probs == 0].any()
    expected = probs.double()[probs > 0] * len(found)
    chi_square = float(((counts[probs > 0] - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("seed", [None, 3])
def test_temperature_0_is_the_argmax_and_the_lowest_id_wins_ties(seed):
    random = None if seed is None else generator(seed)
    for logits, expected in (([1, 5, 2, 5, 5], 1), ([0, 0, 0], 0), ([-math.inf, -3, -3], 1), ([7], 0)):
        assert sample(torch.tensor(logits, dtype=torch.float32), SamplingParams(temperature=0), random) == expected


def test_temperature_0_ignores_top_k_and_top_p():
    assert sample(LOGITS, SamplingParams(temperature=0, top_k=3, top_p=0.1), generator()) == 1


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_a_tiny_temperature_is_the_argmax_and_nothing_overflows(temperature, scale):
    assert set(draws(LOGITS * scale, 50, temperature=temperature)) == {1}
    assert set(draws(LOGITS.double() * scale, 50, temperature=temperature)) == {1}


def test_a_huge_temperature_is_nearly_uniform():
    for temperature in (1e9, 1e308):
        assert_follows(draws(LOGITS, temperature=temperature), torch.full((8,), 1 / 8))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    assert_follows(draws(LOGITS, temperature=temperature), torch.softmax(LOGITS.double() / temperature, 0))


def test_draws_follow_a_flat_distribution_over_many_ids():
    assert_follows(draws(torch.zeros(500), count=20_000), torch.full((500,), 1 / 500))


@pytest.mark.parametrize("top_k", [1, 2, 3, 7])
def test_top_k_draws_from_exactly_the_k_likeliest(top_k):
    kept = LOGITS.argsort(descending=True)[:top_k]
    probs = torch.zeros(8).index_put((kept,), torch.softmax(LOGITS, 0)[kept])
    assert_follows(draws(LOGITS, top_k=top_k), probs / probs.sum())


@pytest.mark.parametrize("top_k", [None, 0, 8, 10**6])
def test_top_k_off_or_beyond_the_vocabulary_changes_nothing(top_k):
    assert draws(LOGITS, 200, top_k=top_k) == draws(LOGITS, 200)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.89, 3), (0.91, 4), (0.999999, 4)]
)
def test_top_p_draws_from_the_fewest_ids_that_reach_it(top_p, kept):
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    order = torch.tensor([1, 3, 2, 0])[:kept]
    expected = torch.zeros(4).index_put((order,), probs[order])
    assert_follows(draws(probs.log(), top_p=top_p), expected / expected.sum())


def test_top_p_1_or_none_keeps_everything():
    assert draws(LOGITS, 200, top_p=1) == draws(LOGITS, 200, top_p=1.0) == draws(LOGITS, 200)


def test_top_p_looks_at_what_temperature_and_top_k_left():
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert set(draws(probs.log(), 300, top_k=2, top_p=0.6)) == {0, 1}  # 0.57 of what is left, not 0.4
    assert set(draws(probs.log(), 300, top_k=2, top_p=0.55)) == {0}
    assert set(draws(probs.log(), 300, temperature=0.25, top_p=0.7)) == {0}  # 0.72 once tempered
    assert set(draws(probs.log(), 300, temperature=0.25, top_p=0.75)) == {0, 1}


def test_ids_at_minus_infinity_are_never_drawn():
    """M18: rows of padding, in the middle and at the end."""
    logits = LOGITS.clone()
    logits[[1, 6, 7]] = -math.inf
    for params in ({}, {"temperature": 1e9}, {"top_p": 0.999999}, {"top_k": 7}, {"temperature": 1e-8}):
        assert not {1, 6, 7} & set(draws(logits, 500, **params))
    assert_follows(draws(logits), torch.softmax(logits, 0))


def test_a_single_possible_id_is_drawn():
    logits = torch.full((100,), -math.inf)
    logits[42] = -5.0
    assert set(draws(logits, 100)) == set(draws(logits, 100, top_p=0.5, top_k=3)) == {42}


def test_a_seed_makes_draws_repeatable_and_seeds_differ():
    first = draws(LOGITS, 100, seed=1)
    assert first == draws(LOGITS, 100, seed=1)
    assert len({tuple(draws(LOGITS, 100, seed=seed)) for seed in range(20)}) == 20


def test_padding_the_vocabulary_does_not_change_a_seeded_draw():
    padded = torch.cat((LOGITS, torch.full((1000,), -math.inf)))
    for params in ({}, {"top_k": 3}, {"top_p": 0.9}):
        assert draws(padded, 200, **params) == draws(LOGITS, 200, **params)


def test_the_callers_logits_are_left_alone():
    logits = LOGITS.clone()
    draws(logits, 10, top_k=2, top_p=0.5, temperature=0.3)
    assert torch.equal(logits, LOGITS)


def test_greedy_reads_no_random_number():
    random = generator()
    before = random.get_state()
    sample(LOGITS, SamplingParams(temperature=0), random)
    assert torch.equal(random.get_state(), before)
