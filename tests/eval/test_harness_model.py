"""lean as a model of lm-eval gives the numbers of lm-eval's own ``hf`` model, read from the cache."""

import math

import pytest
import torch
from tiny import BOS

pytest.importorskip("lm_eval")

from harness import DOCUMENTS, PAIRS, hf, instances, lean, scored_ids

from lean import LLM, EngineConfig
from lean.eval.harness.model import LeanLM


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("llama", vocab_size=259)  # no rows without a token: hf generates such ids, lean never does


@pytest.fixture(scope="module")
def exact(folder):
    return lean(folder)


@pytest.fixture(scope="module")
def peer(folder):
    return hf(folder)


def likeliest_pair(model):
    """A context and the letter that follows it under greedy decoding."""
    for context in map(chr, range(48, 123)):
        ids = model.tok_encode(context)
        logits = model.llm.logits(torch.cat([rows for _, rows in model.llm.hidden_states(ids)]))
        letter = model.tokenizer.decode([int(logits[-1].argmax())])
        if letter.isascii() and letter.isprintable() and letter:
            return context, letter
    raise AssertionError("no printable character is ever the most likely")


def test_likelihoods_and_greedy_flags_are_those_of_hf(exact, peer):
    pairs = [*PAIRS, likeliest_pair(exact)]
    ours, theirs = (model.loglikelihood(instances("loglikelihood", pairs)) for model in (exact, peer))
    for (logprob, greedy), (wanted, wanted_greedy) in zip(ours, theirs, strict=True):
        assert logprob == pytest.approx(wanted, abs=1e-4)
        assert greedy == wanted_greedy
    assert ours[-1][1]
    assert not all(greedy for _, greedy in ours)


def test_rolling_likelihoods_are_those_of_hf_over_several_windows(exact, peer):
    assert max(map(len, DOCUMENTS)) > 2 * exact.max_length == 2 * peer.max_length
    ours, theirs = (
        model.loglikelihood_rolling(instances("loglikelihood_rolling", DOCUMENTS)) for model in (exact, peer)
    )
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert ours[-1] == 0


@pytest.mark.parametrize(
    "arguments",
    [{"until": []}, {"until": ["e"]}, {"until": ["zq", " "], "max_gen_toks": 40}, {"until": [], "do_sample": False}],
)
def test_generated_texts_are_those_of_hf(exact, peer, arguments):
    arguments = {"max_gen_toks": 24, **arguments}
    contexts = [(text, arguments) for text in ("The lighthouse", "One", "x" * 200, "The lighthouse")]
    ours, theirs = (model.generate_until(instances("generate_until", contexts)) for model in (exact, peer))
    assert ours == theirs


def test_a_context_too_long_to_generate_after_is_cut_as_hf_does(exact, peer):
    context = "".join(map(chr, (97 + index % 26 for index in range(700))))
    call = [(context, {"until": [], "max_gen_toks": 8})]
    assert exact.generate_until(instances("generate_until", call)) == peer.generate_until(
        instances("generate_until", call)
    )


def test_the_boundary_is_that_of_hf(exact, peer):
    for context, continuation in PAIRS:
        if context:
            pair = instances("loglikelihood", [(context, continuation)])[0]
            assert exact._pair(pair) == peer._encode_pair(context, continuation)


def test_three_tokens_have_the_hand_computed_likelihood(exact):
    ids = exact.tok_encode("abc")
    hidden = torch.cat([rows for _, rows in exact.llm.hidden_states([BOS, *ids])])
    logprobs = exact.llm.logits(hidden).log_softmax(-1)
    wanted = sum(float(logprobs[place, token]) for place, token in enumerate(ids))
    (document,) = exact.loglikelihood_rolling(instances("loglikelihood_rolling", ["abc"]))
    ((pair, _),) = exact.loglikelihood(instances("loglikelihood", [("", "abc")]))
    ((tail, _),) = exact.loglikelihood(instances("loglikelihood", [("a", "bc")]))
    assert document == pair == pytest.approx(wanted, abs=1e-5)
    alone = torch.cat([rows for _, rows in exact.llm.hidden_states(ids)])
    logprobs = exact.llm.logits(alone).log_softmax(-1)
    assert tail == pytest.approx(float(logprobs[0, ids[1]] + logprobs[1, ids[2]]), abs=1e-5)


def test_likelihoods_read_the_quantized_cache(exact):
    low = LeanLM(LLM(exact.llm.model, EngineConfig(kv_dtype="int4", kv_residual_length=0)), progress=False)
    requests = instances("loglikelihood", PAIRS)
    fine, coarse = ([logprob for logprob, _ in model.loglikelihood(requests)] for model in (exact, low))
    documents = instances("loglikelihood_rolling", DOCUMENTS[:3])
    fine += exact.loglikelihood_rolling(documents)
    coarse += low.loglikelihood_rolling(documents)
    differences = [abs(a - b) for a, b in zip(fine, coarse)]
    assert min(differences[:5]) > 1e-3
    assert max(differences) < 0.2 * max(map(abs, fine))  # the same model still


def test_a_window_takes_documents_of_any_length_in_one_piece(folder, monkeypatch):
    model = lean(folder, window=64)
    text = "a document longer than the model " * 60
    seen, (total,) = scored_ids(model, monkeypatch, "loglikelihood_rolling", [text])
    assert [(len(ids), count) for ids, count in seen] == [(len(text) + 1, len(text))]
    assert len(text) > 512
    assert math.isfinite(total)
    assert model.truncated()["items"] == 0


@pytest.mark.slow
def test_the_demo_model_scores_documents_and_continuations_as_hf_does():
    from lean.eval.corpus import python_docs
    from lean.eval.harness.cloze import make_items
    from lean.store.pull import pull

    torch.set_num_threads(2)
    source = pull("smollm2-135m")
    text = python_docs()
    documents = [text[start : start + 500] for start in range(0, 200_000, 20_000)]
    pairs = [(item["context"], f" {word}") for item in make_items(text, 5) for word in item["choices"]]
    ours, theirs = (
        (
            model.loglikelihood_rolling(instances("loglikelihood_rolling", documents)),
            model.loglikelihood(instances("loglikelihood", pairs)),
        )
        for model in (lean(source), hf(source))
    )
    rolling = max(abs(a - b) / abs(b) for a, b in zip(ours[0], theirs[0], strict=True))
    pairwise = max(abs(a - b) for (a, _), (b, _) in zip(ours[1], theirs[1], strict=True))
    print(f"{len(documents)} documents: {rolling:.1e} of their sum; {len(pairs)} continuations: {pairwise:.1e}")
    assert rolling < 1e-5  # sums of some 400 nats in float32: 1.3e-3 of one was seen
    assert pairwise < 1e-4
    assert [greedy for _, greedy in ours[1]] == [greedy for _, greedy in theirs[1]]
