"""Draws follow the formulas.

Distributions are read off exactly: a sampler gets evenly spaced numbers instead of random ones, so each id comes out
within one draw of its probability. The formulas are written once more in support/distribution.py, in plain Python, and
transformers' own processors are a second opinion.
"""

import math

import numpy as np
import pytest
import torch
from distribution import AtTheEdge, formula, with_transformers
from draws import LOGITS, Numbers, assert_evenly, assert_follows, counts, draws, make
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from lean.sampling_params import SamplingParams


@st.composite
def asked(draw, **more):
    """(logits, prompt, output, parameters, expected probabilities), with ties, padding and any filters together."""
    size = draw(st.integers(1, 12))
    level = st.integers(-3, 3).map(float) | st.floats(-4, 4, width=16, allow_subnormal=False)
    logits = draw(st.lists(level, min_size=size, max_size=size))
    padding = draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    logits = [-math.inf if i in padding else x for i, x in enumerate(logits)]
    tokens = st.lists(st.sampled_from([i for i in range(size) if i not in padding]), max_size=4)
    options = {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 1, 2.5]),
        "top_k": st.integers(1, size + 1),
        "top_p": st.floats(0.05, 1),
        "min_p": st.sampled_from([0, 0.05, 0.2, 0.5, 1]),
        **more,
    }
    params = {"temperature": 1.0, **draw(st.fixed_dictionaries({}, optional=options))}
    prompt, output = (draw(tokens), draw(tokens)) if more else ([], [])
    try:
        expected = formula(logits, prompt, output, SamplingParams(**params))
    except AtTheEdge:
        reject()
    return torch.tensor(logits, dtype=torch.float64), prompt, output, params, expected


@given(asked())
@settings(max_examples=60)
def test_draws_follow_the_formulas_of_the_filters(case):
    logits, _, _, params, expected = case
    assert_evenly(counts(logits, 150, **params), expected)


PENALTIES = {
    "repetition_penalty": st.sampled_from([0.5, 1, 1.1, 2.0]),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.just(0), st.floats(-3, 3)),
}


@given(asked(**PENALTIES))
@settings(max_examples=40)
def test_draws_follow_the_formulas_of_penalties_and_filters_together(case):
    logits, prompt, output, params, expected = case
    assert_evenly(counts(logits, 60, prompt, output, **params), expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.15, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_draws_follow_transformers(params, seed):
    random = np.random.default_rng(seed)
    logits, prompt, output = torch.tensor(random.normal(0, 2, 20)), random.integers(0, 20, 6).tolist(), [3, 3, 11]
    resolved = SamplingParams(**{"temperature": 1.0, **params})
    expected = with_transformers(logits, prompt, output, resolved)
    assert np.allclose(expected, formula(logits, prompt, output, resolved), atol=1e-12)
    assert_evenly(counts(logits, 150, prompt, output, **params), expected)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3}], ids=str)
def test_random_draws_follow_the_distribution(params):
    expected = formula(LOGITS, [], [], SamplingParams(**{"temperature": 1.0, **params}))
    assert_follows(draws(LOGITS, 4000, **params), expected)


def test_random_draws_follow_a_flat_distribution_over_many_ids():
    assert_follows(draws(torch.zeros(200), 8000), np.full(200, 1 / 200))


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": 8}, {"top_k": 10**6}, {"top_p": 1}, {"min_p": 0}], ids=str)
def test_a_filter_that_is_off_changes_nothing(off):
    assert draws(LOGITS, 200, **off) == draws(LOGITS, 200)


def test_top_k_keeps_all_ties_of_the_kth():
    logits = torch.tensor([2.0, 1.0, 3.0, 2.0, 2.0, 0.0])
    assert set(draws(logits, 500, top_k=2)) == {0, 2, 3, 4}
    assert set(draws(torch.zeros(4), 200, top_k=1)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.89, 3), (0.91, 4), (0.999999, 4)]
)
def test_top_p_draws_from_the_fewest_ids_that_reach_it(top_p, kept):
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    order = [1, 3, 2, 0][:kept]
    expected = np.zeros(4)
    expected[order] = probs[order] / probs[order].sum()
    assert_evenly(counts(probs.log(), 500, top_p=top_p), expected)


def test_top_p_takes_the_lowest_ids_among_ties():
    for top_p in (0.4, 0.5):  # 0.5 is reached by four exactly
        assert set(draws(torch.zeros(8), 300, top_p=top_p)) == {0, 1, 2, 3}
    assert max(draws(torch.zeros(4096), 300, top_p=0.25)) < 1024


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99, 0.999999])
def test_top_p_over_a_large_vocabulary_loses_no_id_to_the_shortcut(top_p):
    logits = np.random.default_rng(0).normal(0, 3, 20_000)
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    within = np.cumsum(probs[order]) - probs[order] < top_p
    least_likely = int(order[within][-1])
    nucleus = probs * np.isin(np.arange(len(probs)), order[within])
    # A number in the middle of the share of the nucleus's least likely id draws that id only if the nucleus is right.
    number = (nucleus[:least_likely].sum() + nucleus[least_likely] / 2) / nucleus.sum()
    sampler = make(top_p=top_p)
    sampler._random = Numbers(number)
    assert sampler.sample(torch.tensor(logits)) == least_likely


def test_top_p_applies_after_temperature_and_top_k():
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert set(draws(probs.log(), 300, top_k=2, top_p=0.6)) == {0, 1}  # 0.57 of what is left, not 0.4
    assert set(draws(probs.log(), 300, top_k=2, top_p=0.55)) == {0}
    assert set(draws(probs.log(), 300, temperature=0.25, top_p=0.7)) == {0}  # 0.72 once tempered
    assert set(draws(probs.log(), 300, temperature=0.25, top_p=0.75)) == {0, 1}


def test_min_p_is_relative_to_the_most_likely_id_and_keeps_ids_at_the_bound():
    logits = torch.tensor([0.0, -1.0, -2.0, 0.0])
    assert set(draws(logits, 300, min_p=1)) == {0, 3}
    assert set(draws(logits, 300, min_p=math.exp(-1) + 1e-6)) == {0, 3}
    assert set(draws(logits, 300, min_p=math.exp(-1) - 1e-6)) == {0, 1, 3}
    assert set(draws(logits, 300, min_p=0.3, temperature=2)) == {0, 1, 2, 3}
