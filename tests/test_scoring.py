"""Scores of given tokens: the engine's own logits give the same ones, and other sequences change nothing."""

import pytest
import torch
from engine_state import wrap_part
from helpers import refusal
from tiny import tokens
from transformers import AutoModelForCausalLM

from lean import LLM, EngineConfig, SamplingParams
from lean.errors import EngineError
from lean.eval.score.continuations import score_continuations
from lean.scoring import score_many

SEQUENCES = [tokens(length, seed=length) for length in (5, 130, 2, 64, 65, 1, 33, 200)]


@pytest.fixture(scope="module")
def model(tiny):
    return LLM(str(tiny("llama"))).model


def engine(model, **config):
    return LLM(model, EngineConfig(**{"prefill_chunk": 48, "max_num_batched_tokens": 100, **config}))


def scored(llm, sequences=SEQUENCES):
    found = dict(score_many(llm.engine, sequences))
    assert sorted(found) == list(range(len(sequences)))
    return [found[index] for index in range(len(sequences))]


def test_every_sequence_is_scored_once_and_all_blocks_come_back(model):
    llm = engine(model)
    for ids, scores in zip(SEQUENCES, scored(llm)):
        assert scores.logprobs.shape == scores.greedy.shape == (len(ids) - 1,)
        assert (scores.logprobs <= 0).all()
    assert llm.stats().tokens_held == 0
    assert not llm.has_work


def test_exactly_the_most_likely_tokens_are_greedy(model):
    llm = engine(model)
    ids = SEQUENCES[3]
    logits = llm.logits(torch.cat([rows for _, rows in llm.hidden_states(ids[:-1])]))
    limit = llm.model.token_limit  # rows that pad the vocabulary never count
    ids = [*ids[:10], int(logits[9, :limit].argmax()), *ids[11:]]
    logits = llm.logits(torch.cat([rows for _, rows in llm.hidden_states(ids[:-1])]))
    (scores,) = scored(llm, [ids])
    assert scores.greedy.tolist() == (logits[:, :limit].argmax(-1) == torch.tensor(ids[1:])).tolist()
    assert scores.greedy[9]


def test_scores_and_reported_log_probabilities_are_those_of_transformers(tiny, model):
    """Over all rows of the head: those that pad the vocabulary have a share of the probability."""
    ids = tokens(70)
    llm = engine(model, kv_dtype="fp32", deterministic=True)
    [output] = llm.generate([ids], SamplingParams(3, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=0))
    whole = ids + output.token_ids
    reference = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)
    with torch.inference_mode():
        rows = reference(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
    assert rows.shape[1] > llm.model.token_limit
    expected = rows.gather(1, torch.tensor(whole[1:])[:, None])[:, 0]
    told = torch.tensor([entry.logprob for entry in [*output.prompt_logprobs[1:], *output.logprobs]])
    torch.testing.assert_close(told, expected, atol=1e-5, rtol=0)
    assert torch.equal(told, llm.score(whole))
    [(_, end, greedy)] = score_continuations(llm, [(whole, 3)])
    assert (end, greedy) == (sum(entry.logprob for entry in output.logprobs), True)


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4"])
def test_scores_of_a_deterministic_engine_do_not_depend_on_the_batch(model, kv_dtype):
    alone = [scored(engine(model, kv_dtype=kv_dtype, deterministic=True), [ids])[0] for ids in SEQUENCES]
    for size in (1, 2, 8):
        together = scored(engine(model, kv_dtype=kv_dtype, deterministic=True, max_num_seqs=size))
        for one, other in zip(alone, together):
            assert torch.equal(one.logprobs, other.logprobs)
            assert torch.equal(one.greedy, other.greedy)


def test_four_copies_score_as_five_do(model):
    ids = SEQUENCES[1]
    for copies in range(1, 9):
        for scores in scored(engine(model, kv_dtype="fp32"), [ids] * copies):
            torch.testing.assert_close(scores.logprobs, engine(model, kv_dtype="fp32").score(ids), atol=1e-5, rtol=0)


def test_the_last_token_is_no_part_of_the_longest_sequence(model):
    llm = engine(model, max_model_len=64, block_size=8)
    assert len(llm.score(tokens(65))) == 64
    assert "64" in refusal(llm.score, tokens(66))
    assert llm.stats().tokens_held == 0


def test_what_cannot_be_scored_is_refused_before_anything_runs(model):
    llm = engine(model)
    assert "empty" in refusal(scored, llm, [[5, 6], []])
    assert "token id 9999" in refusal(scored, llm, [[5, 9999]])
    assert "token id -1" in refusal(scored, llm, [[5, -1, 6]])
    assert not llm.has_work


def test_leaving_early_or_failing_frees_everything(model, monkeypatch):
    llm = engine(model, max_num_seqs=2)
    scores = score_many(llm.engine, SEQUENCES)
    next(scores)
    scores.close()
    assert not llm.has_work
    assert llm.stats().tokens_held == 0
    wrap_part(monkeypatch, llm, "run", lambda run: lambda chunks: run(chunks) * torch.nan)
    with pytest.raises(EngineError, match="non-finite"):
        scored(llm)
    assert llm.stats().tokens_held == 0
