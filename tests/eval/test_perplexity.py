"""Perplexity by its definition: every token scored once, from the tokens it may see, equal to transformers."""

import math
from itertools import pairwise

import pytest
import torch
from helpers import refusal
from hypothesis import given
from hypothesis import strategies as st
from tiny import BOS
from transformers import AutoModelForCausalLM

from lean import LLM, EngineConfig
from lean.eval.corpus import Corpus
from lean.eval.score.perplexity import cut, perplexity, prepare

TEXT = Corpus("sample", "The quick brown fox\n\njumps over the lazy dog, é😀! " * 6, "repeated")


@pytest.fixture(scope="module")
def folder(tiny):
    return str(tiny("llama"))


def engine(folder, **config):
    return LLM(folder, EngineConfig(**{"kv_dtype": "fp32", "dtype": "float32", "max_num_seqs": 1, **config}))


def score(llm, **options):
    return perplexity(llm, prepare(llm, TEXT, **options))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.sampled_from(["first", "every", "none"]))
def test_every_token_is_scored_once_from_the_tokens_it_may_see(count, context, stride, bos):
    context, stride = max(context, stride), min(context, stride)
    ids = list(range(100, 100 + count))
    scored = []
    for index, part in enumerate(cut(ids, context, stride, bos, 1)):
        front = bos == "every" or (bos == "first" and part.start == 0)
        assert part.token_ids.count(1) == front
        assert part.token_ids[:1] == [1] or not front
        assert len(part.token_ids) <= context + 1  # the last one is a target only
        wanted = part.token_ids[part.first :]
        assert wanted == ids[part.start : part.start + len(wanted)]
        assert part.token_ids[part.first - 1] in (ids[part.start - 1] if part.start else 1, 1)
        if index and not front:
            assert part.first >= max(1, min(context - stride, part.start))
        scored += wanted
    assert scored == (ids if bos != "none" else ids[1:])


def strided_loop(folder, ids, context, stride):
    """The loop of https://huggingface.co/docs/transformers/perplexity; with stride = context each window also gets the
    token before it, so that its first token is predicted too."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, done = 0.0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        first = max(0, min(begin, done - 1))
        with torch.no_grad():
            logprobs = model(torch.tensor([ids[first:end]])).logits[0].double().log_softmax(-1)
        for target in range(max(1, done), end):
            total -= float(logprobs[target - 1 - first, ids[target]])
        done = end
        if end == len(ids):
            return math.exp(total / (len(ids) - 1))


@pytest.mark.parametrize(("context", "stride"), [(40, 40), (40, 20), (40, 7), (400, 400), (33, 32)])
def test_perplexity_is_that_of_a_transformers_loop(folder, context, stride):
    llm = engine(folder)
    result = score(llm, context=context, stride=stride, bos="none")
    report = result.report()
    ids = llm.model.tokenizer(TEXT.text)["input_ids"]
    assert report["token_ppl"] == pytest.approx(strided_loop(folder, ids, min(context, len(ids)), stride), rel=1e-5)
    assert report["tokens_scored"] == len(ids) - 1
    total = float(result.nll.sum())
    assert report["word_ppl"] is None or report["word_ppl"] == pytest.approx(
        math.exp(total / len(TEXT.text.split())), rel=1e-9
    )
    assert report["byte_ppl"] == pytest.approx(math.exp(total / len(TEXT.text.encode())), rel=1e-9)
    assert report["nll_stderr"] == pytest.approx(float(result.nll.std()) / (len(ids) - 1) ** 0.5)


def test_logprobs_of_three_tokens_by_hand(folder):
    llm = engine(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = llm.model.tokenizer("abc")["input_ids"]
    with torch.no_grad():
        p = model(torch.tensor([[BOS, *ids]])).logits[0].double().log_softmax(-1)
    want = [-float(p[i, ids[i]]) for i in range(3)]
    found = perplexity(llm, prepare(llm, Corpus("abc", "abc", ""), bos="first"))
    assert found.nll.tolist() == pytest.approx(want, abs=1e-5)
    assert perplexity(llm, prepare(llm, Corpus("abc", "abc", ""), bos="none")).nll.tolist() != pytest.approx(want[1:])


def test_bos_stands_once_and_is_never_scored(folder):
    llm = engine(folder)
    text = prepare(llm, TEXT, context=50, bos="every")
    assert all(part.token_ids[0] == BOS and part.token_ids.count(BOS) == 1 for part in text.parts)
    assert [part.token_ids.count(BOS) for part in prepare(llm, TEXT, context=50).parts][:2] == [1, 0]
    assert score(llm, context=50, bos="every").report()["tokens_scored"] == len(text.token_ids)


def test_a_text_that_is_cut_keeps_the_characters_of_its_tokens(folder):
    llm = engine(folder)
    text = prepare(llm, TEXT, max_tokens=30)
    assert text.token_ids == llm.model.tokenizer(TEXT.text)["input_ids"][:30]
    assert text.text == TEXT.text[:30]  # a token is a byte here, and these are ASCII
    assert score(llm, max_tokens=30).report()["bytes"] == 30


def test_parts_run_together_with_the_same_scores(folder):
    alone = score(engine(folder, deterministic=True, kv_dtype="int8"), context=40, stride=20)
    for size in (2, 8):
        together = score(engine(folder, deterministic=True, kv_dtype="int8", max_num_seqs=size), context=40, stride=20)
        assert torch.equal(alone.nll, together.nll)
        fast = score(engine(folder, kv_dtype="int8", max_num_seqs=size), context=40, stride=20)
        assert len(fast.nll) == len(alone.nll)


def test_a_window_scores_a_text_longer_than_the_model(folder):
    llm = engine(folder, window=64)
    text = Corpus("long", TEXT.text * 4, "")
    scored = prepare(llm, text)
    assert len(scored.parts) == 1
    assert len(scored.token_ids) > llm.model.info.max_position_embeddings
    assert len(perplexity(llm, scored).nll) == len(scored.token_ids)


def test_the_curve_counts_every_token_once(folder):
    result = score(engine(folder), context=100, stride=50)
    buckets = result.curve()
    assert sum(bucket.tokens for bucket in buckets) == len(result.nll)
    assert sum(b.nll * b.tokens for b in buckets) == pytest.approx(float(result.nll.sum()))
    assert all(a.end <= b.start for a, b in pairwise(buckets))


def test_quantized_caches_are_really_read(folder):
    exact = score(engine(folder)).nll
    errors = [
        float((score(engine(folder, kv_dtype=name, kv_residual_length=0)).nll - exact).abs().mean())
        for name in ("int8", "fp8", "int4")
    ]
    assert 1e-6 < errors[0] < errors[1] < errors[2]


def test_impossible_numbers_are_refused_in_one_line(folder):
    llm = engine(folder, max_model_len=128)
    assert "context 200" in refusal(prepare, llm, TEXT, context=200)
    assert "stride 60 exceeds context 50" in refusal(prepare, llm, TEXT, context=50, stride=60)
    assert "max-tokens 0" in refusal(prepare, llm, TEXT, max_tokens=0)
    assert "bos 'last'" in refusal(prepare, llm, TEXT, bos="last")
    assert "nothing to score" in refusal(prepare, llm, Corpus("a", "a", ""), bos="none")
