"""K by channel in an engine: a group is encoded in the step that completes it, whatever else happens to a request.

Deterministic mode: everything is compared to the bit with a request alone, computed in one shot.
"""

from contextlib import suppress

import pytest
import torch
from engine_state import nothing_left, preempt, wrap_part
from helpers import refusal
from tiny import tokens
from windowed import loader, same, start

from lean import LLM, EngineConfig, SamplingParams
from lean.cache.block_manager import BlockManager, PoolRule
from lean.cache.block_pool import NULL_BLOCK
from lean.cache.plan import LayerShape, plan_cache
from lean.errors import EngineError
from lean.quant import FP32, parse_kv_dtype

RESIDUAL = {"kv_residual_length": 32, "sinks": 2}
MODELS = ("llama, 2 layers", "gemma3, mixed")
IDS = tokens(100)


@pytest.fixture(scope="module")
def model(tiny):
    return loader(tiny)


def ask(max_tokens: int, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens, **{"temperature": 0.9, "seed": 3, "ignore_eos": True, "logprobs": 0, **params})


def said(llm: LLM, ids: list[int], params: SamplingParams) -> list[tuple]:
    return [(out.token_ids, out.logprobs) for out in llm.generate([ids], params)]


def hidden(llm: LLM, ids: list[int]) -> torch.Tensor:
    return torch.cat([rows for _, rows in llm.hidden_states(ids)])


@pytest.mark.parametrize(
    ("name", "kv_dtype", "window"),
    [(MODELS[0], "pc4v3", None), (MODELS[0], "k=pc3,v=int8", 50), (MODELS[1], "pc4v3", 50)],
    ids=str,
)
def test_one_shot_chunked_and_stepwise_are_the_same_bits(model, name, kv_dtype, window):
    options = {**RESIDUAL, "window": window}
    wanted = hidden(start(model(name), kv_dtype, **options), IDS)
    exact = hidden(start(model(name), "fp32", window=window, sinks=2 if window else None), IDS)
    assert 1e-6 < (wanted - exact).norm() / exact.norm() < 0.2
    for chunk in (31, 64):
        assert same(hidden(start(model(name), kv_dtype, prefill_chunk=chunk, **options), IDS), wanted), chunk


@pytest.mark.parametrize(("name", "block_size"), [(MODELS[0], 64), (MODELS[1], 32)])
def test_forked_preempted_and_warm_requests_give_the_bits_of_one_alone(model, name, block_size):
    """A block of 64 tokens is forked and copied with one group encoded and one not."""
    options = {**RESIDUAL, "block_size": block_size, "prefill_chunk": 30, "max_num_seqs": 3}
    ids, params = IDS[: block_size + 35], ask(20)
    [alone] = said(start(model(name), "pc4v3", prefix_cache=False, **options), ids, params)
    llm = start(model(name), "pc4v3", **options)
    forked = said(llm, ids, ask(20, n=2))
    assert forked[0] == alone
    assert forked[1] != alone
    assert said(llm, ids, params) == [alone]
    [warm] = llm.generate([ids], params)
    assert warm.cached_tokens == len(ids) // block_size * block_size
    first = llm.add_request(ids, params)
    llm.add_request(IDS[20:60], ask(5))
    parts = []
    for step in range(200):
        if step in (2, 12):
            preempt(llm, first)
        parts += [part for part in llm.step() if part.request_id == first]
        if not llm.has_work:
            break
    assert ([t for part in parts for t in part.token_ids], [e for part in parts for e in part.logprobs or []]) == alone
    nothing_left(llm)


@pytest.mark.parametrize("part", ["run", "logits"])
def test_steps_that_failed_around_the_end_of_a_group_are_taken_back(model, monkeypatch, part):
    llm = start(model("llama, 2 layers"), "pc4v3", **RESIDUAL)
    wanted = said(llm, IDS[:60], ask(8))

    def fail(argument: object) -> None:
        raise RuntimeError("out of memory")

    llm = start(model("llama, 2 layers"), "pc4v3", **RESIDUAL)
    llm.add_request(IDS[:60], ask(8))
    parts = []
    for step in range(200):
        if step in (0, 3, 4, 5):
            with monkeypatch.context() as broken:
                wrap_part(broken, llm, part, lambda _: fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    llm.step()
        parts += llm.step()
        if not llm.has_work:
            break
    assert [([t for p in parts for t in p.token_ids], [e for p in parts for e in p.logprobs or []])] == wanted


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("residual", [32, 40])
def test_the_exact_pool_holds_the_whole_group_that_a_sequence_writes_into(block_size, residual):
    """After every step and wherever a sequence is cut: so the group can be encoded when it is complete."""
    blocks = BlockManager([PoolRule(400), PoolRule(400, residual, 4)], block_size)

    def check() -> None:
        table = blocks.table(0, 1)
        assert not blocks.num_tokens(0) % block_size or table[-1] != NULL_BLOCK

    num_cut = 0
    for step in range(60):
        blocks.append(0, (1, 7, 33, 512, 30, 2)[step % 6])
        check()
        blocks.evict(0)
        check()
        with suppress(ValueError):  # the window before it has been evicted
            blocks.truncate(0, blocks.num_tokens(0) - step % 4 * 5)
            num_cut += step % 4 > 0
        check()
    assert num_cut > 20


def test_what_the_cache_held_before_does_not_matter(model):
    """Groups that are not complete hold anything: 0x7F and 0xFF are huge numbers and NaN."""
    results = []
    for pattern in (0, 0x7F, 0xFF):
        llm = start(model("gemma3, mixed"), "k=pc5,v=int3", max_num_seqs=1, max_model_len=128, **RESIDUAL)
        for arena in llm.cache.arenas:
            arena.fill_(pattern)
        results.append(torch.cat([hidden(llm, tokens(length)) for length in (1, 33, 70)]))
    assert same(results[1], results[0])
    assert same(results[2], results[0])


def test_a_nan_in_a_weight_names_its_layer_although_its_group_is_not_encoded(tiny):
    llm = LLM(str(tiny("llama")), EngineConfig("pc4v3"))
    llm.model.module.model.layers[1].self_attn.v_proj.weight[3, 5] = torch.nan
    with pytest.raises(EngineError, match=r"step 1, first in the K/V of layer 1, tokens 0\.\.18"):
        llm.score(IDS[:20])


def test_bytes_are_those_of_the_arithmetic_with_blocks_and_channels(model):
    """llama: 2 KV heads of 16 dims in each of 2 layers. Codes and scales start at multiples of 16 bytes."""
    llm = start(model("llama, 2 layers"), "pc4v3", num_blocks=16)
    assert llm.plan.bytes_per_token == 2 * 2 * ((8 + 1) + (6 + 1))
    pool, exact = llm.plan.pools
    assert pool.block_bytes == 2 * (2 * 32 * 8 + 2 * 2 * 16 + 2 * 32 * 6 + 2 * 32 * 1)
    assert exact.block_bytes == 2 * 2 * 2 * 32 * 16 * 4
    llm.add_request(tokens(480), ask(5))
    llm.step()
    held = llm.stats()
    assert [use.blocks_used for use in held.pools] == [15, 3]  # of 480 tokens: the first 4 and the last 64 exact
    assert held.bytes_held == 15 * pool.block_bytes + 3 * exact.block_bytes


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"block_size": 16}, "pc4 encodes the keys of 32 tokens together: use a --block-size that is a multiple of 32"),
        ({"kv_residual_length": 31}, "use a --kv-residual-length of at least 32, not 31"),
        ({"kv_residual_length": 0}, "use a --kv-residual-length of at least 32, not 0"),
    ],
    ids=str,
)
def test_blocks_and_residuals_that_hold_no_group_are_refused(tiny, options, why):
    assert why in refusal(LLM, str(tiny("llama")), EngineConfig("pc4v3", **options))


def test_latent_vectors_and_odd_heads_are_refused_by_the_name_of_the_format():
    latent = LayerShape(4, 1, 576, 512, v_in_k=True)
    assert "which pc4 cannot read alone" in refusal(plan_cache, [latent], EngineConfig("pc4v3"), FP32)
    odd = LayerShape(4, 1, 72, 72)
    assert "K head_dim 72 does not fit pc4, which needs a multiple of 16" in refusal(
        plan_cache, [odd], EngineConfig("pc4v3"), FP32
    )
    assert "pc4 is a format of K alone" in refusal(EngineConfig, "pc4")
    assert parse_kv_dtype("pc4v3")[0].by_channel
