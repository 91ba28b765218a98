"""min_tokens: an answer does not end before."""

import pytest
from tiny import EOS

from lean import LLM, EngineConfig, RequestError, SamplingParams

CERTAIN = {EOS: 100.0, 50: 90.0}  # the end, and what is drawn where it is barred


@pytest.fixture(scope="module")
def llm(tiny):
    config = EngineConfig(num_blocks=32, max_num_seqs=2, max_model_len=64, device="cpu")
    return LLM(str(tiny("llama", num_hidden_layers=1)), config)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("least", [0, 1, 3])
def test_no_end_is_drawn_before(llm, least, temperature):
    params = SamplingParams(max_tokens=9, min_tokens=least, temperature=temperature, seed=1, logit_bias=CERTAIN)
    output = llm.generate([[5, 6]], params, chat=False)[0]
    assert output.token_ids == [50] * least + [EOS]
    assert output.finish_reason == "stop"


def test_stop_token_ids_are_ends_too(llm):
    params = SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0, logit_bias={50: 100, 51: 90}, stop_token_ids=[50]
    )
    assert llm.generate([[5, 6]], params)[0].token_ids == [51, 51, 50]


def test_each_of_several_sequences_has_its_own_count(llm):
    params = SamplingParams(max_tokens=9, min_tokens=2, n=2, temperature=1.0, seed=1, logit_bias=CERTAIN)
    assert [one.token_ids for one in llm.generate([[5, 6]], params)] == [[50, 50, EOS]] * 2


def test_more_than_the_model_has_room_for_are_refused_with_the_number_that_fits(llm):
    params = SamplingParams(max_tokens=100, min_tokens=63, ignore_eos=True)
    with pytest.raises(RequestError, match=r"^min-tokens 63 must be at most 62: .* 64 tokens, and the prompt has 2$"):
        llm.add_request([5, 6], params)
    assert len(llm.generate([[5]], params)[0].token_ids) == 63


@pytest.mark.parametrize("least", [-1, 1.5, 10])
def test_impossible_numbers_are_refused(least):
    with pytest.raises(RequestError, match="min-tokens"):
        SamplingParams(max_tokens=9, min_tokens=least)
