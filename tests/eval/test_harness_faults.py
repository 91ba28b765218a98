"""A request of lm-eval that cannot be run as usual does not end the others, and is counted by item."""

import json
import logging
import math

import pytest
import torch
from helpers import refusal
from tiny import byte_tokenizer

pytest.importorskip("lm_eval")

from harness import hf, instances, lean
from tokenizers import Tokenizer

from lean.errors import EngineError
from lean.eval.harness.model import LeanLM

MERGES = [("A", "n"), ("An", "s"), ("w", "e"), ("we", "r"), ("Ans", "wer")]
NOTHING = {"items": 0, "first": None}


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("llama")


@pytest.fixture(scope="module")
def engine(folder):
    return lean(folder).llm


@pytest.fixture
def model(engine):
    return LeanLM(engine, progress=False)


def merging(tokenizer):
    """The tokenizer with five merges: "Answer" becomes one token."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = [list(pair) for pair in MERGES]
    vocabulary = state["model"]["vocab"]
    for first, second in MERGES:
        vocabulary[first + second] = len(vocabulary)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    return tokenizer


def likelihoods(model, pairs, task="task"):
    return model.loglikelihood(instances("loglikelihood", pairs, task))


def test_a_pair_that_merges_at_the_boundary_is_encoded_apart_and_counted(model, caplog):
    model.tokenizer = merging(byte_tokenizer())
    assert model.tok_encode("Answer") == [263]
    pairs = [("Ans", "wer"), ("One", " two"), ("Ans", "w"), ("Say  Ans", "wer")]
    with caplog.at_level(logging.WARNING, "lean"):
        found = likelihoods(model, pairs)
    ids = [260, 262]  # "Ans", "wer"
    assert found[0][0] == pytest.approx(float(model.llm.score(ids)[-1]), abs=1e-4)
    assert found[1:3] == likelihoods(LeanLM(model.llm, progress=False), [pairs[1]]) + likelihoods(model, [pairs[2]])
    assert all(math.isfinite(logprob) for logprob, _ in found)
    counted = model.faults.report("task")["encoded_apart"]
    assert counted["items"] == 2
    assert "'Ans', 'wer'" in counted["first"]
    assert "2 items have a context and a continuation that merge" in caplog.text
    assert model.get_model_info()["faults"]["encoded_apart"] == counted
    assert model.faults.report("other")["encoded_apart"] == NOTHING


def test_a_pair_that_merges_in_part_is_split_as_hf_splits_it(model, folder):
    peer = hf(folder)
    model.tokenizer, peer.tokenizer = merging(byte_tokenizer()), merging(byte_tokenizer())
    pairs = [("Ans", "wer is"), ("An", "swer"), ("A", "nswers")]
    ours, theirs = (likelihoods(each, pairs[:1]) for each in (model, peer))
    assert ours[0][0] == pytest.approx(theirs[0][0], abs=1e-4)
    assert model.faults.report() == {"failed": NOTHING, "encoded_apart": NOTHING}
    for pair in pairs:
        assert model._pair(instances("loglikelihood", [pair])[0])[1]


def test_items_that_cannot_be_scored_count_as_wrong_and_the_others_go_on(model, caplog):
    good = [("The lighthouse", " stood"), ("One", " two")]
    bad = [("a", ""), ("", ""), ("a", "b" * 600)]
    want = likelihoods(LeanLM(model.llm, progress=False), good)
    with caplog.at_level(logging.WARNING, "lean"):
        found = likelihoods(model, [bad[0], good[0], *bad[1:], good[1]])
    assert [found[1], found[4]] == want
    assert [found[0], found[2], found[3]] == [(-math.inf, False)] * 3
    failed = model.faults.report("task")["failed"]
    assert failed["items"] == 3
    assert "task item 0" in failed["first"]
    assert "has no tokens" in failed["first"]
    assert "3 items could not be run" in caplog.text


def test_a_token_that_the_model_does_not_have_fails_its_item_only(model, monkeypatch):
    want = likelihoods(LeanLM(model.llm, progress=False), [("One", " two")])
    encode = model.tok_encode
    monkeypatch.setattr(
        model, "tok_encode", lambda text, *a, **k: [900 if i == 92 else i for i in encode(text, *a, **k)]
    )
    (unknown,) = (chr(c) for c in range(33, 127) if encode(chr(c)) == [92])
    found = likelihoods(model, [("One", unknown), ("One", " two"), (unknown, " two")])
    assert found == [(-math.inf, False), *want, (-math.inf, False)]
    assert "token id 900" in model.faults.report()["failed"]["first"]
    totals = model.loglikelihood_rolling(instances("loglikelihood_rolling", ["One two", unknown]))
    assert math.isfinite(totals[0])
    assert totals[1] == -math.inf


def test_a_text_that_is_not_utf8_fails_its_item_only(model):
    """JSON can spell half of a surrogate pair, and Python reads it."""
    half, usual = "One\ud83d", {"until": [], "max_gen_toks": 2}
    found = likelihoods(model, [(half, " two"), ("One", " two"), ("One", half)])
    assert [math.isfinite(logprob) for logprob, _ in found] == [False, True, False]
    totals = model.loglikelihood_rolling(instances("loglikelihood_rolling", [half, "One two"]))
    assert [math.isfinite(total) for total in totals] == [False, True]
    texts = model.generate_until(instances("generate_until", [(half, usual), ("One", usual)]))
    assert [bool(text) for text in texts] == [False, True]
    assert "not valid UTF-8" in model.faults.report()["failed"]["first"]


def test_generations_that_cannot_run_are_empty_and_the_others_go_on(model, caplog):
    usual = {"until": [], "max_gen_toks": 6}
    bad = [
        {"num_beams": 4},
        {"temperature": -1.0, "do_sample": True},
        {"max_gen_toks": 512},
        {"no_such": 1},
        {"max_gen_toks": "many"},
        {"max_gen_toks": math.inf},
        {"temperature": "hot"},
        {"until": [5]},
    ]
    contexts = [("The lighthouse", usual), *(("One", usual | other) for other in bad), ("One", usual)]
    want = [model.generate_until(instances("generate_until", [contexts[i]]))[0] for i in (0, -1)]
    with caplog.at_level(logging.WARNING, "lean"):
        found = model.generate_until(instances("generate_until", contexts))
    assert [found[0], found[-1]] == want
    assert found[1:-1] == [""] * len(bad)
    assert model.faults.report()["failed"]["items"] == len(bad)
    assert "num_beams" in caplog.text
    assert "at most 511" in refusal(model.generate_until, instances("generate_until", [contexts[3]]))


def test_non_finite_numbers_fail_the_item_that_has_them_only(model, monkeypatch):
    pairs = [("One", " two"), ("Bad", " day"), ("The lighthouse", " stood")]
    want = likelihoods(LeanLM(model.llm, progress=False), pairs)
    texts = [(context, {"until": [], "max_gen_toks": 4}) for context, _ in pairs]
    want_texts = model.generate_until(instances("generate_until", texts))
    bad = model.tok_encode("B")[0]
    embedding = model.llm.model.module.get_input_embeddings().weight
    row = embedding[bad].clone()
    embedding[bad] = torch.nan
    try:
        found = likelihoods(model, pairs)
        found_texts = model.generate_until(instances("generate_until", texts))
        with pytest.raises(EngineError, match="non-finite"):
            likelihoods(model, pairs[1:2])
    finally:
        embedding[bad] = row
    assert [found[0], found[2]] == [pytest.approx(want[0], abs=1e-4), pytest.approx(want[2], abs=1e-4)]
    assert found[1] == (-math.inf, False)
    assert found_texts == [want_texts[0], "", want_texts[2]]
    assert "non-finite" in model.faults.report()["failed"]["first"]
    assert not model.llm.has_work
    assert model.llm.stats().tokens_held == 0
