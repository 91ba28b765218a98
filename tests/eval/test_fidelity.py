"""Fidelity follows its formulas, ranks formats correctly, and does not depend on the chunk size."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint, tokens

from lean import LLM, EngineConfig
from lean.eval.corpus import Corpus
from lean.eval.score.fidelity import (
    compare,
    divergence,
    floor_config,
    full_config,
    greedy_continuations,
    prompts_of,
    read_reference,
)
from lean.eval.score.perplexity import prepare
from lean.kernels import ops
from lean.quant import INT4, quantize_dequantize

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
    limit = exact.model.token_limit  # rows that pad the vocabulary are never the most likely
    best = [[{*x[:limit].topk(5).indices.tolist()} for x in rows] for rows in (p, q)]
    assert found.tokens_scored == len(targets) == len(reference.scored.token_ids)
    assert found.kld_mean == pytest.approx(float(kld.mean()), rel=1e-2, abs=1e-7)
    assert found.kld_stderr == pytest.approx(float(kld.std()) / len(kld) ** 0.5, rel=1e-2)
    assert found.kld_median <= found.kld_p99 <= found.kld_p999 <= float(kld.max()) * 1.01
    assert found.top1 == pytest.approx(float((p[:, :limit].argmax(-1) == q[:, :limit].argmax(-1)).double().mean()))
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
    from faults import sabotage

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


def test_constant_keys_cost_nothing_however_far_they_are_off(exact, reference, monkeypatch):
    """One vector added to every stored key does not change the softmax. So the measure is the KLD of predictions, never
    the error of the stored numbers: here the larger error is the harmless one."""
    write, errors = ops.kv_write, {}

    def moved(pool, key, value, slots):
        shift = 3.0 * key.std() * torch.ones(key.shape[-1])
        errors["moved"] = float((shift**2).mean())
        write(pool, key + shift, value, slots)

    def rounded(pool, key, value, slots):
        found = quantize_dequantize(key, INT4)
        errors["rounded"] = float(((found - key) ** 2).mean())
        write(pool, found, value, slots)

    klds = {}
    for name, broken in (("moved", moved), ("rounded", rounded)):
        monkeypatch.setattr(ops, "kv_write", broken)
        klds[name] = compare(reference, candidate(exact, "fp32", kv_residual_length=None)).kld_mean
    assert errors["moved"] > 100 * errors["rounded"]
    assert klds["moved"] < klds["rounded"] / 100


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_enormous_key_biases_stay_close_in_eight_bits(tmp_path, kv_dtype):
    """Two key channels of layer 0, times 500, dominate the scale; still predictions change by less than 0.01."""
    from faults import outlier_keys

    llm = LLM(str(outlier_keys(tmp_path / "model")), EXACT)
    text = read_reference(llm, prepare(llm, TEXT, context=200))
    assert compare(text, candidate(llm, kv_dtype)).kld_mean < 1e-2


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
def test_scales_in_a_checkpoint_are_named_and_not_used(tmp_path, exact, reference, scale, caplog):
    """lean computes its own scale for every vector. Unknown tensors of a checkpoint are named in a warning."""
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    for layer in range(3):
        for part in ("k_scale", "v_scale"):
            weights[f"model.layers.{layer}.self_attn.{part}"] = torch.tensor(scale)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(folder), EngineConfig("fp8", dtype="float32", kv_residual_length=0, max_num_seqs=1))
    assert "model.layers.0.self_attn.k_scale" in caplog.text
    assert compare(reference, llm) == compare(reference, candidate(exact, "fp8"))
