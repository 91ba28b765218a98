"""Fidelity by its formulas, in the right order, and blind to how the text was cut into chunks."""

import pytest
import torch
from tiny import tokens

from lean import LLM, EngineConfig
from lean.eval.corpus import Corpus
from lean.eval.fidelity import (
    compare,
    divergence,
    floor_config,
    full_config,
    greedy_continuations,
    prompts_of,
    read_reference,
)
from lean.eval.perplexity import prepare

TEXT = Corpus("sample", "The quick brown fox\n\njumps over the lazy dog, é😀! " * 5, "repeated")
EXACT = EngineConfig(kv_dtype="fp32", dtype="float32", max_num_seqs=1)


@pytest.fixture(scope="module")
def exact(tiny):
    return LLM(str(tiny("llama")), EXACT)


@pytest.fixture(scope="module")
def reference(exact):
    return read_reference(exact, prepare(exact, TEXT, context=90, bos="first"))


def candidate(exact, kv_dtype, **config):
    return LLM(
        exact.model, EngineConfig(**{"kv_dtype": kv_dtype, "kv_residual_length": 0, "max_num_seqs": 1, **config})
    )


def test_figures_follow_their_formulas(exact, reference):
    llm = candidate(exact, "int4", prefill_chunk=512)
    found = compare(reference, llm)
    p, q, targets = [], [], []
    for part in reference.scored.parts:
        for engine, rows in ((exact, p), (llm, q)):
            hidden = torch.cat([rows for _, rows in engine.hidden_states(part.token_ids[:-1])])
            rows.append(engine.logits(hidden)[part.first - 1 :].double().log_softmax(-1))
        targets += part.token_ids[part.first :]
    p, q = torch.cat(p), torch.cat(q)
    kld = (p.exp() * (p - q)).sum(-1)
    nll = [-x[range(len(targets)), targets] for x in (p, q)]
    best = [{*x.topk(5).indices.tolist()} for x in p], [{*x.topk(5).indices.tolist()} for x in q]
    assert found.tokens_scored == len(targets) == len(reference.scored.token_ids)
    assert found.kld_mean == pytest.approx(float(kld.mean()), rel=1e-2, abs=1e-7)
    assert found.kld_stderr == pytest.approx(float(kld.std()) / len(kld) ** 0.5, rel=1e-2)
    assert found.kld_median <= found.kld_p99 <= found.kld_p999 <= float(kld.max()) * 1.01
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert found.top5 == pytest.approx(sum(len(a & b) for a, b in zip(*best)) / 5 / len(targets))
    assert found.ppl_exact == pytest.approx(float(nll[0].mean().exp()), rel=1e-5)
    assert found.ppl == pytest.approx(float(nll[1].mean().exp()), rel=1e-5)
    assert found.nll_delta == pytest.approx(float((nll[1] - nll[0]).mean()), abs=1e-6)


def test_formats_stand_in_the_order_of_their_bits_above_the_floor(exact, reference):
    floor = compare(reference, LLM(exact.model, floor_config(EXACT)))
    klds = [compare(reference, candidate(exact, name)).kld_mean for name in ("int8", "fp8", "int4")]
    assert abs(floor.kld_mean) < klds[0] / 3
    assert klds == sorted(klds)
    assert floor.top1 == pytest.approx(1.0, abs=0.01)


def test_a_residual_and_an_exact_cache_come_closer(exact, reference):
    plain, residual = (compare(reference, candidate(exact, "int4", kv_residual_length=r)).kld_mean for r in (0, 64))
    assert residual < plain
    assert abs(compare(reference, candidate(exact, "fp32", kv_residual_length=None)).kld_mean) < 1e-6


@pytest.mark.parametrize("factor", [1.05, 2.0])
def test_wrong_scales_are_seen(exact, reference, factor, monkeypatch):
    from test_probe import sabotage

    healthy = compare(reference, candidate(exact, "int8")).kld_mean
    sabotage(monkeypatch, factor, layers=None if factor == 2 else {1}, keys_only=factor != 2)
    broken = compare(reference, candidate(exact, "int8")).kld_mean
    assert broken > healthy * (2 if factor == 1.05 else 100)


def test_a_window_is_compared_with_everything_in_sight(exact):
    config = EngineConfig("int8", window=64, dtype="float32", max_num_seqs=1)
    full = full_config(config)
    assert full.window is None
    llm = LLM(exact.model, config)
    whole = read_reference(LLM(exact.model, full), prepare(llm, TEXT, context=200))
    assert compare(whole, llm).kld_mean > compare(whole, candidate(exact, "int8")).kld_mean


@pytest.mark.parametrize("size", [1, 2, 8])
def test_scores_do_not_depend_on_the_batch(exact, size):
    config = {"deterministic": True, "dtype": "float32"}
    one = LLM(exact.model.info.source, EngineConfig("fp32", max_num_seqs=1, **config))
    reference = read_reference(one, prepare(one, TEXT, context=60))
    alone = compare(reference, LLM(one.model, EngineConfig("int4", max_num_seqs=1, **config)))
    assert compare(reference, LLM(one.model, EngineConfig("int4", max_num_seqs=size, **config))) == alone


def test_greedy_answers_part_where_they_first_differ():
    found = divergence([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1]], [[1, 2, 9, 4], [5, 6, 7, 8], [2, 1, 1, 1]])
    assert (found.mean, found.identical, found.prompts, found.max_tokens) == (2.0, 1, 3, 4)
    assert found.stderr == pytest.approx((4 / 3) ** 0.5)


def test_greedy_answers_are_greedy_and_whole(exact):
    prompts = prompts_of(tokens(200), 3, 20)
    assert [len(prompt) for prompt in prompts] == [20, 20, 20]
    answers = greedy_continuations(exact, prompts, 12)
    assert [len(answer) for answer in answers] == [12, 12, 12]
    for prompt, answer in zip(prompts, answers):
        assert all(exact.score(prompt + answer)[19:] <= 0)
    assert divergence(answers, answers).identical == 3
    assert prompts_of(tokens(10), 4, 20) == [tokens(10)]
