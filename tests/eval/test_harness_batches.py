"""Requests of lm-eval in batches: equal results alone and together, equal requests run once, nothing is left behind."""

import pytest
import torch

pytest.importorskip("lm_eval")

from harness import PAIRS, instances, lean

from lean import LLM, EngineConfig
from lean.eval.harness.model import LeanLM
from lean.eval.score import continuations
from lean.scoring import hidden_states_of


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("llama", vocab_size=259)  # no rows without a token: hf generates such ids, lean never does


@pytest.fixture(scope="module")
def exact(folder):
    return lean(folder)


@pytest.mark.parametrize("copies", range(1, 9))
def test_copies_of_a_request_score_as_one_does(exact, copies):
    ((wanted, _),) = exact.loglikelihood(instances("loglikelihood", PAIRS[:1]))
    found = exact.loglikelihood(instances("loglikelihood", PAIRS[1:4] + PAIRS[:1] * copies))
    assert [logprob for logprob, _ in found[3:]] == pytest.approx([wanted] * copies, abs=1e-5)


def test_equal_requests_and_those_that_differ_in_the_last_token_run_once(exact, monkeypatch):
    run = []
    monkeypatch.setattr(
        continuations,
        "hidden_states_of",
        lambda engine, some, *rest: run.extend(some) or hidden_states_of(engine, some, *rest),
    )
    exact.loglikelihood(instances("loglikelihood", [("One answer: ", letter) for letter in "ABCDAB"]))
    assert [len(ids) for ids in run] == [len("One answer: ")]
    texts = []
    add_request = exact.llm.add_request
    monkeypatch.setattr(exact.llm, "add_request", lambda ids, params: texts.append(ids) or add_request(ids, params))
    greedy, sampled = {"until": [], "max_gen_toks": 2}, {"until": [], "max_gen_toks": 2, "temperature": 1.0}
    exact.generate_until(instances("generate_until", [("a", greedy), ("a", sampled), ("a", greedy), ("a", sampled)]))
    assert len(texts) == 3


def test_contexts_that_begin_alike_are_found_in_the_prefix_cache_and_score_the_same(exact):
    shots, scores, found = "Question? An answer. " * 12, [], []  # 252 tokens
    pairs = [(f"{shots}Item {number}: ", " yes" * number) for number in range(1, 6)]
    for prefix_cache in (True, False):
        config = EngineConfig(kv_dtype="k8v4", deterministic=True, max_num_seqs=1, prefix_cache=prefix_cache)
        model = LeanLM(LLM(exact.llm.model, config), progress=False)
        scores.append(model.loglikelihood(instances("loglikelihood", pairs)))
        found.append(model.llm.stats().prefix.tokens_found)
    assert scores[0] == scores[1]
    assert found[0] >= 3 * 224  # the first is computed, and the second to keep the tail where they part
    assert found[1] == 0


@pytest.mark.parametrize("kv_dtype", ["fp32", "k8v4"])
def test_a_deterministic_engine_gives_the_same_bits_at_every_batch_size(exact, kv_dtype):
    answers, counts = [], []
    for size in (1, 2, 8):
        config = EngineConfig(
            kv_dtype=kv_dtype, deterministic=True, max_num_seqs=size, prefill_chunk=40, max_num_batched_tokens=96
        )
        model = LeanLM(LLM(exact.llm.model, config), progress=False)
        call = [(context, {"until": [], "max_gen_toks": 4}) for context, _ in PAIRS[1:5]]
        answers.append(
            (
                model.loglikelihood(instances("loglikelihood", PAIRS[:6])),
                model.loglikelihood_rolling(instances("loglikelihood_rolling", ["A short one.", "word " * 20])),
                model.generate_until(instances("generate_until", call)),
            )
        )
        counts.append(model.tokens_scored)
    assert answers[0] == answers[1] == answers[2]
    assert counts[0] == counts[1] == counts[2] > 150


def test_sampling_is_repeatable_with_torchs_seed_and_copies_differ(exact):
    call = [("Once", {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_p": 0.9})] * 3

    def texts(seed):
        torch.manual_seed(seed)
        return exact.generate_until(instances("generate_until", call))

    assert texts(1) == texts(1) != texts(2)
    assert len(set(texts(1))) == 3


def test_leaving_a_generation_frees_everything(exact, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("lean.eval.harness.model.tqdm.update", fail)
    call = [(context, {"until": [], "max_gen_toks": 4}) for context, _ in PAIRS]
    with pytest.raises(KeyboardInterrupt):
        exact.generate_until(instances("generate_until", call))
    exact.llm.step()
    assert not exact.llm.has_work
    assert exact.llm.stats().tokens_held == 0
