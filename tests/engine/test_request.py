"""Token ids as callers give them: served as they are, or refused."""

from array import array

import numpy
import pytest
import torch
from helpers import refusal

from lean import LLM, EngineConfig, SamplingParams
from lean.engine.request import read_token_ids

SERVED = {
    "a list": [1, 2, 3],
    "a tuple": (1, 2, 3),
    "a range": range(1, 4),
    "an array": array("i", [1, 2, 3]),
    "a numpy array": numpy.array([1, 2, 3]),
    "a numpy array of uint8": numpy.array([1, 2, 3], dtype=numpy.uint8),
    "a tensor": torch.tensor([1, 2, 3]),
    "a tensor of int32": torch.tensor([1, 2, 3], dtype=torch.int32),
    "numpy integers": [numpy.int64(1), numpy.uint8(2), 3],
}
REFUSED = {
    "text": "ab",
    "bytes": b"ab",
    "a bytearray": bytearray(b"ab"),
    "a memoryview": memoryview(b"ab"),
    "a generator": (token for token in [1, 2, 3]),
    "a set": {1, 2, 3},
    "a dict": {1: 2},
    "None": None,
    "a number": 7,
    "true": [True, 2],
    "a numpy bool": [numpy.bool_(True)],
    "an array of bools": numpy.array([True, False]),
    "a tensor of bools": torch.tensor([True, False]),
    "a fraction": [1, 2.0],
    "an array of fractions": numpy.array([1.0, 2.0]),
    "a tensor of fractions": torch.tensor([1.0, 2.0]),
    "words": ["1", "2"],
    "bytes inside": [b"a"],
    "a nested list": [[1, 2]],
    "tensors inside": [torch.tensor(1)],
    "an array of two dimensions": numpy.array([[1, 2]]),
    "a tensor of two dimensions": torch.tensor([[1, 2]]),
    "a tensor without dimensions": torch.tensor(1),
    "null inside": [1, None],
    "negative": [-1],
    "beyond the vocabulary": [10],
    "beyond 64 bits": [10**30],
    "thousands of digits": [10**6000],
}


@pytest.mark.parametrize("given", SERVED.values(), ids=SERVED)
def test_integers_of_every_kind_are_token_ids(given):
    ids = read_token_ids(given, 10)
    assert ids == [1, 2, 3]
    assert {type(token) for token in ids} == {int}


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_everything_else_is_refused(given):
    message = refusal(read_token_ids, given, 10)
    assert "prompt is" in message or "must be an integer from 0 to 9" in message
    assert len(message) < 200


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny("llama", num_hidden_layers=1)), EngineConfig())


def test_every_way_into_the_engine_reads_ids_alike(llm):
    params = SamplingParams(max_tokens=2)
    ids = [50, 60, 70]
    want = llm.generate([ids], params)[0].token_ids
    assert llm.generate(numpy.array([ids]), params)[0].token_ids == want
    assert llm.generate((torch.tensor(row) for row in [ids]), params)[0].token_ids == want
    assert [token for part in llm.stream(torch.tensor(ids), params) for token in part.token_ids] == want
    assert (llm.score(numpy.array(ids)) == llm.score(ids)).all()
    for bad in (b"ab", [True, 1], [[1]], None):
        for call in (llm.add_request, llm.score, lambda bad: list(llm.stream(bad)), lambda bad: llm.generate([bad])):
            assert refusal(call, bad)
    assert "not bytes" in refusal(llm.generate, b"ab")
    assert "not int" in refusal(llm.generate, 7)
    assert not llm.has_work
