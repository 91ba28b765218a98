"""From logits to one id: greedy without surprises, draws that follow the formulas, log-probabilities of the model.

Distributions are read off exactly: a sampler is given evenly spaced numbers instead of random ones, so each id comes
out within one draw of its probability. The formulas are written once more here, in plain Python, and transformers'
own processors are a second opinion.
"""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lean.engine import sampler as module
from lean.engine.sampler import Sampler, TokenLogprob, token_logprobs
from lean.errors import EngineError
from lean.sampling_params import SamplingParams

LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0, 2.75, -0.5, 1.5])
EVERYTHING = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3} | {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {0: 1.5, 3: -1.0},
}


def make(prompt=(), index=0, **params) -> Sampler:
    return Sampler(SamplingParams(**{"temperature": 1.0, "seed": 0, **params}), prompt, index)


def draws(logits, count, prompt=(), index=0, **params) -> list[int]:
    sampler = make(prompt, index, **params)
    return [sampler.sample(logits) for _ in range(count)]


def force(sampler, ids, vocab) -> None:
    """Make the sampler choose these ids: each is the only possible one."""
    for token in ids:
        only = torch.full((vocab,), -math.inf)
        only[token] = 0.0
        assert sampler.sample(only) == token


class Numbers:
    """In the place of random.Random: gives the numbers it was made with, the last one for ever."""

    def __init__(self, *numbers):
        self._numbers = list(numbers)

    def random(self):
        return self._numbers.pop(0) if len(self._numbers) > 1 else self._numbers[0]


def counts(logits, points, prompt=(), output=(), **params) -> np.ndarray:
    """How often each id is drawn after ``output``, the numbers being evenly spaced in 0 .. 1."""
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


class AtTheEdge(Exception):
    """A probability lies so near a bound that rounding decides on which side."""


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


def assert_evenly(found: np.ndarray, probs) -> None:
    """Each id as often as its probability says, to within one draw; ids without probability never."""
    probs = np.asarray(probs, dtype=np.float64)
    assert not found[probs == 0].any()
    assert np.abs(found - probs * found.sum()).max() <= 1 + 1e-6


def assert_follows(found: list[int], probs) -> None:
    """Chi-square of the counts of random draws, far out in its tail; ids without probability never occur."""
    probs = np.asarray(probs, dtype=np.float64)
    seen = np.bincount(found, minlength=len(probs))
    assert not seen[probs == 0].any()
    expected = probs[probs > 0] * len(found)
    chi_square = ((seen[probs > 0] - expected) ** 2 / expected).sum()
    freedom = max(1, len(expected) - 1)
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom)


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


# --- the distribution ---


@st.composite
def asked(draw, **more):
    """(logits, prompt, output, parameters, what they give): ties, padding, whatever filters together."""
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
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=40, deadline=None)
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
    # A number in the middle of what the least likely id of the nucleus holds: it is drawn only if all is as it must be.
    number = (nucleus[:least_likely].sum() + nucleus[least_likely] / 2) / nucleus.sum()
    sampler = make(top_p=top_p)
    sampler._random = Numbers(number)
    assert sampler.sample(torch.tensor(logits)) == least_likely


def test_top_p_looks_at_what_temperature_and_top_k_left():
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    assert set(draws(probs.log(), 300, top_k=2, top_p=0.6)) == {0, 1}  # 0.57 of what is left, not 0.4
    assert set(draws(probs.log(), 300, top_k=2, top_p=0.55)) == {0}
    assert set(draws(probs.log(), 300, temperature=0.25, top_p=0.7)) == {0}  # 0.72 once tempered
    assert set(draws(probs.log(), 300, temperature=0.25, top_p=0.75)) == {0, 1}


def test_min_p_is_relative_to_the_likeliest_and_keeps_what_equals_it():
    logits = torch.tensor([0.0, -1.0, -2.0, 0.0])
    assert set(draws(logits, 300, min_p=1)) == {0, 3}
    assert set(draws(logits, 300, min_p=math.exp(-1) + 1e-6)) == {0, 3}
    assert set(draws(logits, 300, min_p=math.exp(-1) - 1e-6)) == {0, 1, 3}
    assert set(draws(logits, 300, min_p=0.3, temperature=2)) == {0, 1, 2, 3}


# --- extremes ---


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_a_tiny_temperature_is_the_argmax_and_nothing_overflows(temperature, scale):
    """U09."""
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
    """M18: rows of padding, in the middle and at the end."""
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


# --- bias and penalties ---


def test_logit_bias_can_force_and_ban_and_is_not_used_up():
    assert set(draws(LOGITS, 50, temperature=0, logit_bias={2: 100})) == {2}
    assert draws(LOGITS, 50, temperature=0, logit_bias={1: -100, 5: -100}) == [3] * 50


def test_repetition_penalty_counts_the_prompt_and_the_output_once():
    logits = torch.tensor([4.0, 3.0, -1.0])
    assert make([0, 0, 0], temperature=0, repetition_penalty=1.3).sample(logits) == 0  # 3.08: once, not thrice
    assert make([0], temperature=0, repetition_penalty=1.4).sample(logits) == 1
    sampler = make(temperature=0, repetition_penalty=1.4)
    assert [sampler.sample(logits) for _ in range(3)] == [0, 1, 0]
    negative = torch.tensor([-1.0, -1.5])
    assert make([0], temperature=0, repetition_penalty=1.6).sample(negative) == 1  # multiplied, not divided


def test_presence_and_frequency_penalties_leave_the_prompt_alone():
    logits = torch.tensor([2.0, 1.0])
    sampler = make([0] * 50, temperature=0, presence_penalty=1.5)
    assert [sampler.sample(logits) for _ in range(4)] == [0, 1, 0, 0]
    sampler = make([0] * 50, temperature=0, frequency_penalty=0.75)
    assert [sampler.sample(logits) for _ in range(6)] == [0, 0, 1, 0, 1, 0]


def test_a_negative_presence_or_frequency_penalty_invites_repetition():
    sampler = make(temperature=0, presence_penalty=-2, logit_bias={1: 100})
    force(sampler, [0], 2)
    assert sampler.sample(torch.tensor([99.0, 0.0])) == 0  # 101 against 100


def test_bias_comes_before_the_repetition_penalty_and_that_before_the_others():
    # 4 + 2 = 6, halved 3, minus 1 = 2; in any other order it is 2.5, 3, 4 or 4.5
    for rival, expected in ((1.99, 0), (2.01, 1)):
        sampler = make([0], temperature=0, logit_bias={0: 2}, repetition_penalty=2, presence_penalty=1)
        force(sampler, [0], 2)
        assert sampler.sample(torch.tensor([4.0, rival])) == expected


def test_greedy_with_penalties_follows_the_formula_over_a_long_answer():
    random = torch.Generator().manual_seed(1)
    params = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {5: 2.0}}
    prompt, output = [3, 7, 7, 11], []
    sampler = make(prompt, temperature=0, **params)
    for _ in range(200):
        logits = torch.randn(40, generator=random) * 2
        tempered = SamplingParams(temperature=0.01, **params)  # the formula has no temperature 0
        probs = formula(logits, prompt, output, tempered)
        output.append(sampler.sample(logits))
        assert output[-1] == probs.index(max(probs))
    assert len(set(output)) > 10


def test_the_prompt_is_read_once():
    """What a token costs does not grow with the context."""
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


# --- seeds ---


FLAT = torch.zeros(64)


def assert_independent(streams: list[list[int]]) -> None:
    """Streams of draws from FLAT: each uniform, and any two equal at a step as often as chance says."""
    assert len({tuple(stream) for stream in streams}) == len(streams)
    assert_follows([token for stream in streams for token in stream], np.full(64, 1 / 64))
    table = np.array(streams)
    pairs = len(streams) * (len(streams) - 1) / 2
    equal = sum((np.bincount(step) * (np.bincount(step) - 1) / 2).sum() for step in table.T)
    trials = pairs * table.shape[1]
    assert abs(equal - trials / 64) < 5 * math.sqrt(trials / 64)


def test_a_hundred_prompts_with_one_seed_get_independent_noise():
    """P18."""
    assert_independent([draws(FLAT, 20, [5, 6, i], seed=42) for i in range(100)])
    assert_independent([draws(FLAT, 20, [7] * i, seed=42) for i in range(100)])


def test_siblings_of_one_prompt_get_independent_noise():
    assert_independent([draws(FLAT, 20, [5, 6], index, seed=42) for index in range(100)])


def test_seeds_get_independent_noise_and_all_their_bits_count():
    assert_independent([draws(FLAT, 20, [5, 6], seed=seed) for seed in range(100)])
    assert_independent([draws(FLAT, 20, [5, 6], seed=1 + (i << 32)) for i in range(100)])


def test_seed_index_and_prompt_are_told_apart():
    streams = [(1, 1, [1]), (11, 1, []), (1, 11, []), (1, 1, [1, 1]), (1, 1, [11]), (1, 0, [1]), (0, 1, [1])]
    assert len({tuple(draws(FLAT, 10, ids, index, seed=seed)) for seed, index, ids in streams}) == len(streams)


def test_the_same_prompt_and_seed_get_the_same_draws_whatever_runs_beside():
    """P18."""
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


# --- log-probabilities ---


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    x = logits.double().numpy()
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 10_000.0, -10_000.0])
def test_log_probabilities_are_the_log_softmax_of_the_raw_logits(dtype, offset):
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 300, generator=random) * 4 + offset).to(dtype)
    ids = [0, 299, 17, 4, 150]
    expected = log_softmax(logits)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6
    for row, found in enumerate(token_logprobs(logits, ids, 7)):
        assert found.token_id == ids[row]
        assert found.logprob == pytest.approx(expected[row, ids[row]], abs=tolerance)
        order = np.argsort(-expected[row], kind="stable")[:7]
        assert [token for token, _ in found.top] == order.tolist()
        assert [x for _, x in found.top] == pytest.approx(expected[row, order].tolist(), abs=tolerance)


def test_the_chosen_token_is_reported_in_or_out_of_the_top():
    [best, other] = token_logprobs(torch.stack([LOGITS, LOGITS]), [1, 2], 3)
    assert [token for token, _ in best.top] == [1, 5, 3]
    assert best.top == other.top
    assert best.logprob == best.top[0][1] == pytest.approx(log_softmax(LOGITS)[1])
    assert other.logprob == pytest.approx(log_softmax(LOGITS)[2])


def test_the_lowest_ids_come_first_among_ties_and_win_the_last_places():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0] * 6])
    first, second = token_logprobs(logits, [0, 0], 4)
    assert [token for token, _ in first.top] == [1, 3, 0, 2]
    assert [token for token, _ in second.top] == [0, 1, 2, 3]
    [many] = token_logprobs(torch.zeros(1, 5000), [0], 5)
    assert [token for token, _ in many.top] == [0, 1, 2, 3, 4]


def test_the_first_of_the_top_is_what_greedy_chooses_even_where_log_probabilities_round_to_one():
    logits = torch.zeros(1, 100_000)
    logits[0, 7], logits[0, 50_000] = 0.1, float(np.nextafter(np.float32(0.1), np.float32(1)))
    [found] = token_logprobs(logits, [7], 2)
    assert found.top[0][1] == found.top[1][1]
    assert found.top[0][0] == make(temperature=0).sample(logits[0]) == 50_000


@pytest.mark.parametrize(("top", "shown"), [(0, 0), (1, 1), (4, 4), (5, 5), (6, 5), (8, 5), (10**6, 5)])
def test_padding_is_never_among_the_top(top, shown):
    """M18."""
    logits = LOGITS.clone()
    logits[[1, 6, 7]] = -math.inf
    [found] = token_logprobs(logits[None], [3], top)
    assert [token for token, _ in found.top] == [5, 3, 0, 4, 2][:shown]
    assert sum(math.exp(x) for _, x in found.top) <= 1 + 1e-6


def test_log_probabilities_are_plain_json_numbers_even_at_extremes():
    logits = torch.tensor([[1e30, -1e30, 0.0, -math.inf], [-5.0, -math.inf, -math.inf, -math.inf]])
    found = token_logprobs(logits, [1, 0], 4)
    json.dumps([[x.token_id, x.logprob, x.top] for x in found], allow_nan=False)
    assert found[1] == TokenLogprob(0, 0.0, ((0, 0.0),))


@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_a_chosen_token_without_a_log_probability_is_an_error(bad):
    logits = torch.stack([LOGITS, LOGITS])
    logits[1, 4] = bad
    with pytest.raises(EngineError, match="token 4"):
        token_logprobs(logits, [4, 4], 0)


def test_no_rows_give_no_log_probabilities():
    assert token_logprobs(torch.zeros(0, 8), [], 3) == []


def test_log_probabilities_leave_the_logits_alone():
    logits = LOGITS[None].clone()
    token_logprobs(logits, [0], 3)
    assert torch.equal(logits[0], LOGITS)
