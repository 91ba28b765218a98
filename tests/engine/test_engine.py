"""LLM: what generate, stream, score and abort promise, and that no request leaves a block behind."""

import json
import logging
import shutil
from contextlib import contextmanager

import pytest
import torch
from engine_state import nothing_left, wrap_part
from helpers import refusal
from tiny import BOS, EOS, VOCAB_SIZE, byte_tokenizer, tokens
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from lean.config import EngineConfig
from lean.engine.runner import finite_rows
from lean.errors import EngineError
from lean.llm import LLM
from lean.sampling_params import SamplingParams

KINDS = ("llama", "gemma3")
PROMPT = tokens(40)


def ask(max_tokens: int = 10, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params})


@pytest.fixture(scope="module")
def models(tiny):
    return {kind: LLM(str(tiny(kind))).model for kind in KINDS}


@pytest.fixture
def engine(models):
    """``engine(kind, folder or loaded model, **config)``; at the end of the test nothing may be left."""
    made = []

    def make(model="llama", **config) -> LLM:
        config = {"block_size": 16, "prefill_chunk": 16, "max_model_len": 256, **config}
        made.append(LLM(models.get(model, model) if isinstance(model, str) else model, EngineConfig(**config)))
        return made[-1]

    yield make
    for llm in made:
        nothing_left(llm)
        assert (llm.stats().tokens_held, llm.stats().bytes_held, llm.stats().bytes_if_bf16) == (0, 0, 0)
        assert llm.step() == []


@contextmanager
def winning(llm: LLM, token: int):
    """Let ``token`` have by far the largest logit after PROMPT."""
    *_, (_, rows) = llm.hidden_states(PROMPT)
    weight = llm.model.module.get_output_embeddings().weight
    saved = weight[token].clone()
    weight[token] = rows[-1] * (1000 / rows[-1].square().sum())
    yield
    weight[token] = saved


@pytest.mark.parametrize("params", [ask(24), ask(24, temperature=1.5, seed=7)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_of_a_stream_are_what_generate_returns(engine, kind, params):
    llm = engine(kind)
    (whole,) = llm.generate("some prompt of 28 characters", params)
    parts = list(llm.stream("some prompt of 28 characters", params))
    assert [part.token_ids for part in parts] == [[token] for token in whole.token_ids]
    assert "".join(part.text for part in parts) == whole.text
    assert whole.text == llm.model.tokenizer.decode(whole.token_ids, skip_special_tokens=True)
    assert [part.finish_reason for part in parts] == [None] * 23 + ["length"]
    assert (whole.finish_reason, whole.prompt_tokens) == ("length", 28)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_together_are_answered_as_each_alone(engine, kind):
    prompts = [tokens(count, seed=count) for count in (1, 17, 33, 70)]
    config = {"deterministic": True, "kv_dtype": "int4", "kv_residual_length": 16}
    together = engine(kind, **config, max_num_batched_tokens=40).generate(prompts, ask())
    alone = engine(kind, **config, max_num_seqs=1, prefill_chunk=64, max_num_batched_tokens=64)
    assert [out.token_ids for out in together] == [alone.generate([p], ask())[0].token_ids for p in prompts]


def test_streams_taken_in_turns_are_whole(engine):
    llm = engine(deterministic=True)
    prompts = [PROMPT[:20], PROMPT]
    alone = [out.token_ids for out in llm.generate(prompts, ask())]
    streams = [llm.stream(prompt, ask()) for prompt in prompts]
    parts = list(zip(*streams))
    for stream in streams:
        stream.close()
    assert [[token for part in column for token in part.token_ids] for column in zip(*parts)] == alone


def test_a_stream_left_early_frees_its_blocks(engine):
    for _ in (llm := engine()).stream(PROMPT, ask(100)):
        assert llm.stats().bytes_held > 0
        break


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_request_can_be_aborted_at_any_phase_and_its_company_does_not_notice(engine, steps):
    llm = engine(max_num_seqs=2, deterministic=True)
    prompts = [tokens(20, seed=seed) for seed in range(4)]
    (expected,) = llm.generate([prompts[1]], ask(6))
    ids = [llm.add_request(prompt, ask(6)) for prompt in prompts]
    found = [out for _ in range(steps) for out in llm.step()]
    for request_id in (ids[0], ids[3], ids[0], 12345):
        llm.abort(request_id)
    while llm.has_work:
        found += llm.step()
    assert [token for out in found if out.request_id == ids[1] for token in out.token_ids] == expected.token_ids
    assert {out.request_id for out in found if out.finish_reason} == set(ids)
    reasons = {out.request_id: out.finish_reason for out in found}
    assert [reasons[request_id] for request_id in ids] == ["abort", "length", "length", "abort"]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_log_probabilities_of_transformers(engine, tiny, kind):
    llm = engine(kind, kv_dtype="fp32")
    reference = AutoModelForCausalLM.from_pretrained(tiny(kind), attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        log_probs = reference(torch.tensor([PROMPT]), use_cache=False).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(llm.score(PROMPT), log_probs[range(39), PROMPT[1:]], atol=1e-4, rtol=0)
    assert llm.score(PROMPT[:1]).shape == (0,)


def test_generation_ends_at_the_end_tokens_of_config_generation_config_and_tokenizer(engine, tiny, tmp_path):
    """Each of the three files may name end tokens that the others do not name; all of them count."""
    folder = shutil.copytree(tiny("llama", eos_token_id=71), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 70]}))
    (tokenizer := byte_tokenizer()).eos_token = "<pad>"
    tokenizer.save_pretrained(folder)
    llm = engine(str(folder))
    for token in (0, 2, 70, 71):
        with winning(llm, token):
            out, on = (llm.generate([PROMPT], ask(3, ignore_eos=ignore))[0] for ignore in (False, True))
        assert (out.token_ids, out.text, out.finish_reason) == ([token], "", "stop")
        assert (on.token_ids[0], len(on.token_ids), on.finish_reason) == (token, 3, "length")


def test_the_text_before_an_end_token_is_printed(engine, monkeypatch):
    llm = engine()
    (free,) = llm.generate([PROMPT], ask(8))
    end = free.token_ids.index(free.token_ids[4])
    monkeypatch.setattr(llm.model, "eos_token_ids", frozenset({free.token_ids[end]}))
    (out,) = llm.generate([PROMPT], ask(8, ignore_eos=False))
    assert (out.token_ids, out.finish_reason) == (free.token_ids[: end + 1], "stop")
    assert out.text == llm.model.tokenizer.decode(free.token_ids[:end], skip_special_tokens=True) != ""


def test_rows_that_belong_to_no_token_are_never_sampled_and_ids_beyond_the_rows_are_refused(engine, tiny):
    llm = engine()
    with winning(llm, 262):
        for params in (ask(1), *(ask(1, temperature=2.0, seed=seed) for seed in range(10))):
            assert llm.generate([PROMPT], params)[0].token_ids[0] < 259
    for ids in ([VOCAB_SIZE], [5, -1], [2**40]):
        assert str(VOCAB_SIZE - 1) in refusal(llm.generate, [ids])
    small = engine(str(tiny("llama", vocab_size=200, num_hidden_layers=1)))  # smaller than its tokenizer
    assert "199" in refusal(small.generate, "😀")
    assert len(small.generate("abc", ask(3))[0].token_ids) == 3


def test_chat_without_a_template_is_refused_and_a_template_beside_the_model_is_used(engine, tiny, tmp_path):
    assert engine().encode("hi") == byte_tokenizer()("hi")["input_ids"]
    assert "no chat template" in refusal(engine().encode, "hi", chat=True)
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
    chat = engine(str(folder))
    assert chat.encode("hi") == chat.encode("hi", chat=True) == byte_tokenizer()("[hi]")["input_ids"]
    assert chat.encode("hi", chat=False) == engine().encode("hi")


def test_template_and_tokenizer_together_write_one_bos_and_a_second_one_is_warned_of(engine, monkeypatch, caplog):
    llm, tokenizer = engine(), byte_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.chat_template = "{{ bos_token }}[{{ messages[0].content }}]"
    monkeypatch.setattr(llm.model, "tokenizer", tokenizer)
    with caplog.at_level(logging.WARNING, "lean"):
        for chat in (True, False):
            assert [token == BOS for token in llm.encode("hi", chat=chat)[:3]] == [True, False, False]
        assert caplog.messages == []
        assert llm.encode("<s>hi", chat=False)[:2] == [BOS, BOS]
    assert ["<s>" in message for message in caplog.messages] == [True]


def test_an_empty_prompt_is_refused_and_the_next_request_is_served(engine):
    llm = engine()
    for call, prompt in ((llm.generate, ""), (llm.generate, [[]]), (llm.generate, ["a", ""]), (llm.score, [])):
        assert "empty" in refusal(call, prompt)
    assert ["empty" in refusal(list, llm.stream(prompt)) for prompt in ("", [])] == [True, True]
    assert llm.generate([]) == []
    assert [len(out.token_ids) for out in llm.generate([" ", "\n", [BOS], [EOS]], ask(2))] == [2] * 4


def test_the_cache_grows_by_its_stated_bytes_and_holds_exactly_its_blocks(engine, tiny):
    """2,000 tokens are decoded one by one, in four sequences."""
    llm = engine(str(tiny("llama", num_hidden_layers=1, max_position_embeddings=2048)), max_model_len=2048)
    assert llm.plan.bytes_per_token == 2 * 2 * (16 + 2)
    for token in range(5, 9):
        llm.add_request([token], ask(500))
    for length in range(1, 501):
        llm.step()
        if length % 100 == 99:
            use, (pool, exact) = llm.stats(), llm.stats().pools
            assert (use.tokens_held, use.bytes_if_bf16) == (4 * length, 4 * length * 2 * 2 * 16 * 2)
            assert pool.bytes_held <= 4 * (length + 16) * llm.plan.bytes_per_token
            assert exact.blocks_used <= 4 * (1 + 5)  # the first 4 tokens and the last 64
            assert all(p.bytes_held == p.blocks_used * s.block_bytes for p, s in zip(use.pools, llm.plan.pools))
            assert use.bytes_held == pool.bytes_held + exact.bytes_held


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8", "int4"])
def test_a_nan_in_a_weight_ends_the_request_and_names_step_and_layer(engine, tiny, kv_dtype):
    broken, healthy = engine(str(tiny("llama")), kv_dtype=kv_dtype), engine(kv_dtype=kv_dtype)
    before = healthy.generate([PROMPT], ask(3))[0].token_ids
    broken.model.module.model.layers[1].self_attn.v_proj.weight[3, 5] = torch.nan
    with pytest.raises(EngineError, match=r"step 1, first in the K/V of layer 1, tokens 0\.\.15"):
        broken.score(PROMPT)
    for out in broken.generate([PROMPT, PROMPT[:3]], ask(3)):
        assert (out.finish_reason, out.token_ids, out.text, "layer 1" in out.error) == ("error", [], "", True)
    assert healthy.generate([PROMPT], ask(3))[0].token_ids == before


def test_a_request_that_goes_wrong_ends_alone_at_the_chunk_that_did(engine, tiny):
    llm = engine(str(tiny("llama")), deterministic=True)
    good = llm.generate([PROMPT], ask(5))[0].token_ids
    llm.model.module.model.embed_tokens.weight[7] = torch.nan
    bad, beside = llm.generate([[7, *PROMPT], [token for token in PROMPT if token != 7]], ask(5))
    assert (bad.finish_reason, beside.token_ids) == ("error", good)
    assert "layer 0, tokens 0..15" in bad.error


@pytest.mark.parametrize("column", [5, PROMPT[4]], ids=["another token", "the prompt's own token"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, -3.4e38])
def test_logits_of_a_prompt_that_overflow_end_its_request_alone(engine, monkeypatch, value, column):
    """``value``: of one logit of the prompt's fourth token. Finite logits far apart give -inf as a log-probability."""
    llm = engine(deterministic=True, prefill_chunk=64)
    beside, bad = PROMPT[:9], PROMPT[:12]
    good = llm.generate([beside], ask(5))[0].token_ids

    def overflowing(logits):
        def call(hidden):
            found = logits(hidden)
            if len(hidden) == len(bad) - 1:  # these rows predict the prompt
                found[3, 7 if value == -3.4e38 else column] = 3.4e38
                found[3, column] = value
            return found

        return call

    wrap_part(monkeypatch, llm, "logits", overflowing)
    failed = llm.engine.add(bad, ask(5, prompt_logprobs=1), collects=True)
    (other,) = llm.generate([beside], ask(5))
    outputs, ended = llm.engine.collect(failed)
    llm.engine.forget(failed)
    assert other.token_ids == good
    assert ended
    is_finite = value == -3.4e38 and column == 5
    assert [out.finish_reason for out in outputs if out.finish_reason] == ["length" if is_finite else "error"]


def test_bad_padding_of_the_head_ends_only_requests_for_log_probabilities(engine, tiny, monkeypatch):
    llm = engine(str(tiny("llama", vocab_size=264)), deterministic=True)
    assert llm.model.token_limit < llm.model.vocab_size
    good = llm.generate([PROMPT[:9]], ask(5))[0].token_ids

    def bad_padding(logits):
        def call(hidden):
            found = logits(hidden)
            found[:, -1] = torch.nan
            return found

        return call

    wrap_part(monkeypatch, llm, "logits", bad_padding)
    failed = llm.engine.add(PROMPT[:9], ask(5, logprobs=1), collects=True)
    (other,) = llm.generate([PROMPT[:9]], ask(5))
    outputs, _ = llm.engine.collect(failed)
    llm.engine.forget(failed)
    assert other.token_ids == good
    assert [out.finish_reason for out in outputs] == ["error"]


def test_values_beyond_448_are_not_clipped_by_fp8(engine, tiny):
    exact = engine(str(tiny("llama")), kv_dtype="fp32")
    projection, largest = exact.model.module.model.layers[0].self_attn.v_proj, []
    projection.register_forward_hook(lambda module, args, out: largest.append(float(out.abs().max())))
    exact.score(PROMPT)
    projection.weight.mul_(900 / max(largest))
    wanted = exact.score(PROMPT)
    assert max(largest) == pytest.approx(900)
    found = engine(exact.model, kv_dtype="k=fp32,v=fp8", kv_residual_length=0).score(PROMPT)
    projection.register_forward_hook(lambda module, args, out: out.clamp(-448, 448))
    clipped = exact.score(PROMPT)
    assert (found - wanted).abs().mean() < (clipped - wanted).abs().mean() / 4


@pytest.mark.parametrize("part", ["run", "logits"])
def test_a_step_that_failed_is_taken_back_and_can_be_run_again(engine, monkeypatch, part):
    llm = engine(deterministic=True)
    (whole,) = llm.generate([PROMPT], ask())
    llm.add_request(PROMPT, ask())
    parts = llm.step() + llm.step() + llm.step()

    def fail(argument):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        wrap_part(broken, llm, part, lambda _: fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.step()
    while llm.has_work:
        parts += llm.step()
    assert [token for part in parts for token in part.token_ids] == whole.token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_spoils_its_row_and_no_other(dtype):
    most = torch.finfo(dtype).max
    rows = torch.tensor([[most, -most, 0.0]]).repeat(5, 1).to(dtype)
    rows[1, 2], rows[2, 0], rows[4, 1] = torch.nan, torch.inf, -torch.inf
    assert finite_rows(rows).tolist() == [True, False, False, True, False]
    assert finite_rows(rows[:0]).tolist() == []
