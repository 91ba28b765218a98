"""Log-probabilities are those of the raw logits and do not depend on the token drawn."""

import json
import math

import numpy as np
import pytest
import torch
from draws import LOGITS, make, read_measured, token_logprobs

from lean.engine.logprobs import TokenLogprob, measure
from lean.errors import EngineError


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
def test_ids_without_probability_are_never_among_the_top(top, shown):
    logits = LOGITS.clone()
    logits[[1, 6, 7]] = -math.inf
    [found] = token_logprobs(logits[None], [3], top)
    assert [token for token, _ in found.top] == [5, 3, 0, 4, 2][:shown]
    assert sum(math.exp(x) for _, x in found.top) <= 1 + 1e-6


@pytest.mark.parametrize("top", [0, 1, 3, 6, 8, 10**6])
def test_padding_is_never_among_the_top_and_has_its_share_of_the_probability(top):
    [found] = read_measured(measure(LOGITS[None], torch.tensor([5]), top, num_tokens=6), top)
    expected = log_softmax(LOGITS)
    assert found.logprob == pytest.approx(expected[5], abs=2e-6)
    assert [token for token, _ in found.top] == [1, 5, 3, 0, 4, 2][:top]
    assert [x for _, x in found.top] == pytest.approx([expected[token] for token, _ in found.top], abs=2e-6)


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
