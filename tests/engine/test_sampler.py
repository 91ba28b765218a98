"""From logits to one id: greedy choice, extreme values, and what a sampler keeps between draws."""

import math

import numpy as np
import pytest
import torch
from draws import EVERYTHING, LOGITS, Numbers, assert_evenly, counts, draws, make

# --- greedy ---


@pytest.mark.parametrize("temperature", [0, 0.0, None])
def test_greedy_is_the_argmax_and_the_lowest_id_wins_ties(temperature):
    for logits, expected in (([1, 5, 2, 5, 5], 1), ([0, 0, 0], 0), ([-math.inf, -3, -3], 1), ([7], 0)):
        for dtype in (torch.float32, torch.float64):
            assert make(temperature=temperature).sample(torch.tensor(logits, dtype=dtype)) == expected


def test_greedy_ignores_the_filters():
    assert make(temperature=0, top_k=3, top_p=0.1, min_p=0.5).sample(LOGITS) == 1


def test_the_lowest_id_wins_ties_that_bias_and_penalties_make():
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert make(temperature=0, logit_bias={0: 2}).sample(logits) == 0
    assert make([1], temperature=0, repetition_penalty=3).sample(torch.tensor([1.0, 3.0, 1.0])) == 0
    sampler = make(temperature=0, presence_penalty=1)
    assert [sampler.sample(logits) for _ in range(2)] == [1, 1]
    sampler = make(temperature=0, frequency_penalty=1)
    assert [sampler.sample(logits) for _ in range(5)] == [1, 1, 2, 0, 1]


# --- extremes ---


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_a_tiny_temperature_is_the_argmax_and_nothing_overflows(temperature, scale):
    for params in ({}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}):
        assert set(draws(LOGITS * scale, 20, temperature=temperature, **params)) == {1}
        assert set(draws(LOGITS.double() * scale, 20, temperature=temperature, **params)) == {1}


@pytest.mark.parametrize("temperature", [1e9, 10**9, 1e308])
def test_a_huge_temperature_is_nearly_uniform(temperature):
    assert_evenly(counts(LOGITS, 400, temperature=temperature), np.full(8, 1 / 8))


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300, 1e308])
@pytest.mark.parametrize("temperature", [0, 1e-8, 1.0])
def test_an_extreme_repetition_penalty_still_draws_possible_ids(penalty, temperature):
    logits = torch.tensor([1e30, -1e30, 2.0, -2.0, -math.inf, 0.0])
    assert 4 not in draws(logits, 50, [0, 1, 2, 3, 4], temperature=temperature, repetition_penalty=penalty)
    below = torch.tensor([-math.inf, -1e30, -2e30])
    assert 0 not in draws(below, 50, [0, 1, 2], temperature=temperature, repetition_penalty=penalty)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1e9},
        {"temperature": 1e-8},
        {"temperature": 0},
        {"top_p": 0.999999},
        {"top_k": 7},
        {"logit_bias": {1: 100, 6: 100, 7: 100}},
        {"repetition_penalty": 0.1},
        {"repetition_penalty": 10},
        {"presence_penalty": -2, "frequency_penalty": -2},
    ],
    ids=str,
)
def test_ids_at_minus_infinity_are_never_drawn(params):
    """Padding of the vocabulary has logits of minus infinity, in the middle and at the end."""
    logits = LOGITS.clone()
    logits[[1, 6, 7]] = -math.inf
    assert not {1, 6, 7} & set(draws(logits, 300, [1, 6, 7], **params))


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_no_number_draws_an_id_without_probability(number):
    logits = torch.tensor([-math.inf, -2000.0, 0.0, -2000.0, 1.0, -math.inf, -2000.0, -math.inf])  # exp gives 0
    for params in ({}, {"top_p": 0.999}, {"top_k": 6}):
        sampler = make(**params)
        sampler._random = Numbers(number)
        assert sampler.sample(logits) in {2, 4}


def test_the_numbers_from_0_to_1_are_shared_out_without_overlap():
    for number, expected in ((0.0, 0), (0.25, 1), (0.5 - 2**-54, 1), (0.5, 2), (1 - 2**-53, 3)):
        sampler = make()
        sampler._random = Numbers(number)
        assert sampler.sample(torch.zeros(4)) == expected


def test_a_single_possible_id_is_drawn():
    logits = torch.full((100,), -math.inf)
    logits[42] = -5.0
    assert set(draws(logits, 50)) == set(draws(logits, 50, [42, 7], **EVERYTHING)) == {42}


def test_padding_the_vocabulary_does_not_change_a_seeded_draw():
    padded = torch.cat((LOGITS, torch.full((1000,), -math.inf)))
    for params in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, EVERYTHING):
        assert draws(padded, 100, [2, 3], **params) == draws(LOGITS, 100, [2, 3], **params)


# --- state ---


def test_the_prompt_is_read_once():
    """So the time per token does not grow with the context."""
    prompt = [1, 5]
    logits = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0, 2.75])
    sampler, other = (make(ids, temperature=0, repetition_penalty=3) for ids in (prompt, list(prompt)))
    assert sampler.sample(logits) == other.sample(logits) == 3
    prompt.clear()
    assert [sampler.sample(logits) for _ in range(5)] == [other.sample(logits) for _ in range(5)]


def test_state_is_kept_only_where_it_is_used():
    def tensors(sampler):
        return [name for name, value in vars(sampler).items() if isinstance(value, torch.Tensor)]

    for params in ({}, {"temperature": 0}, {"repetition_penalty": 1.0, "top_k": 3}):
        sampler = make([1, 2], **params)
        sampler.sample(LOGITS)
        assert not tensors(sampler)
    sampler = make([1, 2], **EVERYTHING)
    assert not tensors(sampler), "made with the first logits"
    sampler.sample(LOGITS)
    assert len(tensors(sampler)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0, 0.3])
def test_the_callers_logits_are_left_alone(dtype, temperature):
    logits = LOGITS.to(dtype)
    for name in (None, *EVERYTHING):
        params = EVERYTHING if name is None else {name: EVERYTHING[name]}
        draws(logits, 5, [1, 2], temperature=temperature, **params)
        assert torch.equal(logits, LOGITS.to(dtype))


def test_the_engines_inference_mode_makes_no_difference():
    sampler = make([1], **EVERYTHING)
    mixed = []
    for step in range(10):
        with torch.inference_mode(step % 2 == 0):
            mixed.append(sampler.sample(LOGITS.clone()))
    assert mixed == draws(LOGITS, 10, [1], **EVERYTHING)
