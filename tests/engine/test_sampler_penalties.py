"""Bias and penalties: what each counts, and in which order they apply."""

import torch
from distribution import formula
from draws import LOGITS, draws, force, make

from lean.sampling_params import SamplingParams


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
