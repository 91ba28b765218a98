"""Sampling parameters: every impossible value is refused, and the message names the field."""

import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from helpers import refusal

from lean.config import DEFAULT_MAX_TOKENS
from lean.sampling_params import SamplingParams

NO_NUMBERS = ("1", True, False, math.nan, math.inf, -math.inf, [], 10**400)
NO_COUNTS = (-1, 1.0, 1.5, "1", True, False, math.nan, math.inf, [], -(10**400))
REFUSED = {
    "max_tokens": (0, None, *NO_COUNTS),
    "min_tokens": (-1, 1.5, "3", True, None, 10**6),
    "n": (0, None, *NO_COUNTS),
    "top_k": NO_COUNTS,
    "logprobs": NO_COUNTS,
    "prompt_logprobs": NO_COUNTS,
    "seed": (2**63, *NO_COUNTS),
    "temperature": (-1, -1e-9, *NO_NUMBERS),
    "top_p": (0, 0.0, -0.1, 1.0001, 3, *NO_NUMBERS),
    "min_p": (-0.1, 1.0001, *NO_NUMBERS),
    "repetition_penalty": (0, 0.0, -1, *NO_NUMBERS),
    "presence_penalty": (-2.001, 2.001, 3, None, *NO_NUMBERS),
    "frequency_penalty": (-2.001, 2.001, 3, None, *NO_NUMBERS),
    "ignore_eos": (None, 0, 1, "yes"),
    "stop": ("", [""], ["a", ""], None, 1, [1], ["a", None], b"a", [b"a"], {"a"}, [["a"]]),
    "stop_token_ids": (None, 1, "1", ["1"], b"ab", [-1], [1.0], [True], [None], {1}, [[1]]),
    "logit_bias": (
        *(0, "", [], [(1, 2)]),
        *({key: 1} for key in (-1, 1.0, True, None, "", "-1", "1.0", "a", "²", "٣", "1" * 5000)),
        *({1: 1, "1": 2}, {"1": 1, "01": 1}),
        *({7: value} for value in (100.1, -100.1, None, *NO_NUMBERS)),
    ),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
def test_an_impossible_value_is_refused_by_the_name_of_its_field(field, value):
    message = refusal(SamplingParams, **{field: value})
    assert message.startswith(field.replace("_", "-") + " must ")
    if len(repr(value)) < 100 and field != "logit_bias":
        assert message.endswith(f", got {value!r}")


def test_every_field_has_values_that_are_refused():
    assert set(REFUSED) == {item.name for item in fields(SamplingParams)}


def test_the_message_says_what_would_be_right():
    assert refusal(SamplingParams, top_p=3) == "top-p must be above 0 and at most 1, got 3"
    assert refusal(SamplingParams, n=0) == "n must be a whole number from 1 to 65536, got 0"
    assert "100.5 for token 7" in refusal(SamplingParams, logit_bias={7: 100.5})
    assert "'x'" in refusal(SamplingParams, logit_bias={"x": 1})


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_a_very_long_bad_value_is_cut(field):
    for value in ("x" * 10**6, ["x" * 10**6, 0], -(10**4000), -(10**5000), {"x" * 10**6: 1}, {1: "x" * 10**6}):
        if field != "stop" or not isinstance(value, str):
            assert len(refusal(SamplingParams, **{field: value})) < 300


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "max_tokens": (1, 2**63, 10**400),
        "n": (1, 10**4),
        "top_k": (None, 0, 1, 10**30),
        "logprobs": (None, 0, 20),
        "prompt_logprobs": (None, 0, 20),
        "seed": (None, 0, 2**63 - 1),
        "temperature": (None, 0, 0.0, 5e-324, 1e-8, 1e9, 1),
        "top_p": (None, 1e-9, 0.5, 1, 1.0),
        "min_p": (None, 0, 0.0, 0.5, 1, 1.0),
        "repetition_penalty": (None, 5e-324, 1, 1.1, 1e308),
        "presence_penalty": (-2, 0, 2, 0.5),
        "frequency_penalty": (-2, 0, 2, 0.5),
        "ignore_eos": (False, True),
        "stop": ((), ("a",), (" ",), ("\n\n", "a")),
        "stop_token_ids": ((), (0,), (1, 2)),
        "logit_bias": (None, {}, {0: -100, 5: 100.0}),
    }.items(),
)
def test_values_at_the_edges_are_accepted_and_kept(field, values):
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


def test_defaults_leave_the_choice_to_the_model():
    params = SamplingParams()
    assert params.max_tokens == DEFAULT_MAX_TOKENS
    assert (params.n, params.presence_penalty, params.frequency_penalty, params.ignore_eos) == (1, 0, 0, False)
    assert (params.stop, params.stop_token_ids) == ((), ())
    others = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "logit_bias")
    assert all(getattr(params, name) is None for name in (*others, "logprobs", "prompt_logprobs"))


def test_stop_strings_and_ids_are_kept_as_tuples_of_their_own():
    stop, ids = ["a", "b"], [3, 4]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("c")
    ids.append(5)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3, 4))
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_logit_bias_is_copied_and_json_keys_become_token_ids():
    given = {"50256": -100, 7: 5}
    params = SamplingParams(logit_bias=given)
    given[8] = 1
    assert params.logit_bias == {50256: -100.0, 7: 5.0}
    assert all(type(key) is int and type(value) is float for key, value in params.logit_bias.items())


def test_parameters_are_values():
    params = SamplingParams(stop=["a"], logit_bias={1: 2}, seed=3)
    assert replace(params) == params
    assert hash(replace(params)) == hash(params)
    assert replace(params, seed=4) != params
    with pytest.raises(FrozenInstanceError):
        params.seed = 4
