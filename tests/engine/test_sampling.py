"""All rows of a step are drawn together: each gets the token that it gets alone, and the host reads once."""

import pytest
import torch
from draws import EVERYTHING
from hypothesis import given, settings
from hypothesis import strategies as st
from reads import HostReads
from row_sampler import draw_row

from lean.engine import host, sampling
from lean.engine.sampler import Sampler
from lean.engine.sampling import REACH, Turn, sample
from lean.sampling_params import SamplingParams

VOCAB = 9000  # more than REACH: a row that keeps many ids is drawn from an eighth of them, then from all


def logits(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows from peaked to flat; every third row has ties everywhere, as logits of bfloat16 models have."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randn(rows, VOCAB, generator=random) * torch.tensor([[6.0], [2.0], [0.7]]).repeat(rows, 1)[:rows]
    found[::3] = found[::3].bfloat16().float()
    found[:, VOCAB - 100 :] = -torch.inf
    return found.to(dtype)


OPTIONS = {
    "temperature": st.sampled_from([0, 0.3, 0.8, 1, 2.5]),
    "top_k": st.sampled_from([0, 1, 20, REACH, 300, 5000, VOCAB - 50, VOCAB]),
    "top_p": st.sampled_from([0.1, 0.5, 0.9, 0.999, 1]),
    "min_p": st.sampled_from([0, 0.05, 0.5, 1]),
    "repetition_penalty": st.sampled_from([1, 1.3]),
    "presence_penalty": st.sampled_from([0, 0.5]),
    "logit_bias": st.just({5: 3.0, 70: -100}),
}
PARAMS = st.fixed_dictionaries({"temperature": OPTIONS.pop("temperature")}, optional=OPTIONS)


def alone(sampler: Sampler, row: torch.Tensor) -> int:
    scores = sampler.scores(row) if sampler.penalizes else row
    return draw_row(scores, sampler.params, 0.0 if sampler.greedy else sampler.number)


@given(st.lists(PARAMS, min_size=1, max_size=7), st.integers(0, 3), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=25)
def test_every_row_gets_the_token_that_it_gets_alone(asked, seed, dtype):
    samplers = [Sampler(SamplingParams(seed=seed, **params), [1, 2, 3], i) for i, params in enumerate(asked)]
    for step in range(2):  # the second with the penalties of the first token
        rows = logits(len(asked), 10 * seed + step, dtype)
        before = rows.clone()
        expected = [alone(sampler, row) for sampler, row in zip(samplers, rows)]
        found, _ = sample(rows, [Turn(sampler, i) for i, sampler in enumerate(samplers)])
        assert [one.token for one in found] == expected
        assert torch.equal(rows, before)


MIXED = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.8, "logprobs": 0},
    EVERYTHING | {"temperature": 0.8, "logprobs": 5},
    {"temperature": 0.5, "top_k": 40, "min_p": 0.1},
    {"temperature": 0, "repetition_penalty": 1.2},
]


def turns(count: int) -> list[Turn]:
    params = [SamplingParams(seed=1, **MIXED[i % len(MIXED)]) for i in range(count)]
    return [Turn(Sampler(one, [1, 2], i), i, one.logprobs) for i, one in enumerate(params)]


@pytest.fixture
def reads(monkeypatch):
    """The number of reads so far."""
    found = []
    real = host.to_host
    monkeypatch.setattr(host, "to_host", lambda tensor: (found.append(tensor.numel()), real(tensor))[1])
    return found


@pytest.mark.parametrize("count", [1, 2, 7, 21])
def test_the_host_reads_once_however_many_rows_and_whatever_they_ask_for(reads, count):
    rows, own = logits(3, 0)[:1].repeat(count, 1), turns(count)
    for step in range(1, 3):
        with HostReads() as seen:
            found, (flags,) = sample(rows, own, [torch.tensor([True, False])])
        assert not seen.count
        assert len(reads) == step
        assert flags.tolist() == [1, 0]
        assert [one.measured is None for one in found] == [turn.logprobs is None for turn in own]


def test_the_host_reads_again_only_for_rows_that_keep_many_ids(reads):
    rows = torch.stack([logits(3, 0)[0], torch.zeros(VOCAB)])
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
    samplers = [Sampler(params, [1], i) for i in range(2)]
    expected = [alone(sampler, row) for sampler, row in zip(samplers, rows)]
    found, _ = sample(rows, [Turn(sampler, i, 1) for i, sampler in enumerate(samplers)])
    assert [one.token for one in found] == expected
    assert [int(one.measured[0, 0]) for one in found] == expected, "log-probabilities are those of the tokens"
    assert len(reads) == 2
    assert reads[1] < reads[0]


@pytest.mark.parametrize("more", [1, 40])
def test_ids_that_tie_with_the_k_th_beyond_the_first_reach_are_drawn(reads, more):
    row = torch.zeros(1, VOCAB)
    row[0, : REACH + more] = 1.0
    samplers = [Sampler(SamplingParams(temperature=1.0, top_k=REACH, seed=1), [1], i) for i in range(100)]
    expected = [alone(sampler, row[0]) for sampler in samplers]
    found, _ = sample(row, [Turn(sampler, 0) for sampler in samplers])
    assert [one.token for one in found] == expected
    assert len(reads) == 2


def test_slices_of_rows_give_the_same_tokens(monkeypatch):
    rows = logits(21, 5)
    together, _ = sample(rows, turns(21))
    monkeypatch.setattr(sampling, "_SCORES", {"cpu": 2 * VOCAB})
    apart, _ = sample(rows, turns(21))
    assert [one.token for one in apart] == [one.token for one in together]


def test_sequences_draw_from_one_row_with_numbers_of_their_own():
    row, params = logits(3, 0)[2:], SamplingParams(temperature=1.0, seed=1)
    samplers = [Sampler(params, [1], i) for i in range(20)]
    expected = [alone(sampler, row[0]) for sampler in samplers]
    found, _ = sample(row, [Turn(sampler, 0) for sampler in samplers])
    assert [one.token for one in found] == expected
    assert len(set(expected)) > 10


def test_padding_is_never_drawn_however_likely_it_is():
    rows = logits(21, 5)
    expected = [one.token for one in sample(rows, turns(21))[0]]
    rows[:, VOCAB - 100 :] = 100.0
    params = [SamplingParams(seed=1, **MIXED[i % len(MIXED)]) for i in range(21)]
    own = [Turn(Sampler(one, [1, VOCAB - 1], i), i, one.logprobs) for i, one in enumerate(params)]
    found, _ = sample(rows, own, num_tokens=VOCAB - 100)
    assert max(one.token for one in found) < VOCAB - 100
    found, _ = sample(rows, turns(21), num_tokens=VOCAB - 100)
    assert [one.token for one in found] == expected


def test_a_step_that_fails_takes_no_number_and_counts_no_token(monkeypatch):
    rows = logits(7, 3)
    expected = [one.token for step in (turns(7),) for _ in range(2) for one in sample(rows, step)[0]]

    def fail(tensor):
        raise RuntimeError("as a device does")

    own, found = turns(7), []
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(host, "to_host", fail)
            with pytest.raises(RuntimeError):
                sample(rows, own)
        found += [one.token for one in sample(rows, own)[0]]
    assert found == expected


def test_rows_that_are_not_numbers_hurt_no_other_row():
    rows = logits(7, 3)
    expected = [one.token for one in sample(rows, turns(7))[0]]
    broken = torch.cat((rows, torch.full((7, VOCAB), torch.nan)))
    found, _ = sample(broken, [*turns(7), *(turn._replace(row=7 + turn.row) for turn in turns(7))])
    assert [one.token for one in found[:7]] == expected
