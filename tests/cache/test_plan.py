"""Which layers share a pool, what a token costs in it, and how many blocks every pool gets."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from helpers import refusal
from hypothesis import given, settings

from lean.cache.block_manager import BlockManager
from lean.cache.plan import LayerShape, plan_cache
from lean.cache.size import size_cache
from lean.config import EngineConfig
from lean.engine.request import Request
from lean.engine.scheduler import Scheduler
from lean.errors import ConfigError
from lean.kernels.layout import ALIGNMENT
from lean.quant import BF16, FP32, INT8, NAMES
from lean.sampling_params import SamplingParams

MIB = 2**20
SMOLLM2 = (LayerShape(9, 3, 64, 64),) * 30
GEMMA = tuple(LayerShape(4, 1, 256, 256, window) for window in [512] * 5 + [0] + [512] * 5 + [0])


def group_of(plan, layer):
    return next(group for group in plan.groups if layer in group.layers)


def plan(layers=SMOLLM2, dtype=BF16, **config):
    return plan_cache(layers, EngineConfig(**config), dtype)


def size(layers=SMOLLM2, dtype=BF16, length=8192, free=256 * MIB, **config):
    config = EngineConfig(**config)
    return size_cache(plan_cache(layers, config, dtype), config, length, free)


def test_layers_are_grouped_by_window():
    p = plan(GEMMA)
    assert [group.window for group in p.groups] == [0, 512]
    assert [group.layers for group in p.groups] == [(5, 11), (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)]
    assert all(layer in group_of(p, layer).layers for layer in range(12))
    for group in p.groups:
        assert p.pools[group.pool_id].layers == p.pools[group.exact_pool_id].layers == group.layers
    assert sorted(i for group in p.groups for i in (group.pool_id, group.exact_pool_id)) == list(range(len(p.pools)))


def test_every_group_with_a_residual_has_an_exact_pool_of_that_window_and_those_sinks():
    p = plan(GEMMA, kv_residual_length=32, sinks=7)
    for group in p.groups:
        pool, exact = p.pools[group.pool_id], p.pools[group.exact_pool_id]
        assert (group.residual_length, group.num_exact_sinks) == (32, 7)
        assert (pool.window, pool.num_sink_tokens, pool.exact) == (group.window, 0, False)
        assert (exact.window, exact.num_sink_tokens, exact.exact) == (32, 7, True)
    assert p.notes == ()


@pytest.mark.parametrize(("kv_dtype", "rotated"), [("int8", (1, 1)), ("fp8", (0, 0)), ("k=fp8,v=int4", (0, 1))])
def test_exact_pools_hold_the_model_dtype_in_the_basis_of_the_quantized_pool(kv_dtype, rotated):
    for dtype in (BF16, FP32):
        (layout,) = plan(SMOLLM2[:1], dtype, kv_dtype=kv_dtype).pools[1].layouts
        assert layout.k_format == replace(dtype, rotate=bool(rotated[0]))
        assert layout.v_format == replace(dtype, rotate=bool(rotated[1]))


@pytest.mark.parametrize("config", [{"kv_dtype": "bf16"}, {"kv_dtype": "auto"}, {"kv_residual_length": 0}], ids=str)
def test_without_a_residual_there_is_one_pool(config):
    p = plan(**config)
    assert len(p.pools) == 1
    assert (p.groups[0].exact_pool_id, p.groups[0].residual_length, p.groups[0].num_exact_sinks) == (None, 0, 0)
    assert (p.residual_length, p.num_exact_sinks) == (0, 0)


def test_a_window_within_the_residual_runs_exact_and_says_so():
    layers = (LayerShape(4, 2, 16, 16, 64), LayerShape(4, 2, 16, 16, 65), LayerShape(4, 2, 16, 16))
    p = plan(layers, FP32)
    (note,) = p.notes
    assert all(word in note for word in ("64", "fp32", "residual"))
    exact = group_of(p, 0)
    assert (exact.residual_length, exact.exact_pool_id) == (0, None)
    assert {fmt for layout in p.pools[exact.pool_id].layouts for fmt in (layout.k_format, layout.v_format)} == {FP32}
    assert not p.pools[exact.pool_id].exact
    for layer in (1, 2):
        pool = p.pools[group_of(p, layer).pool_id]
        assert (pool.layouts[0].k_format, pool.layouts[0].v_format) == (INT8, INT8)


def test_blocks_too_small_for_keys_by_channel_serve_layers_that_run_exact():
    exact, quantized = LayerShape(4, 2, 16, 16, 64), LayerShape(4, 2, 16, 16)
    (pool,) = plan((exact,), FP32, kv_dtype="pc4v3", block_size=16).pools
    assert pool.layouts[0].k_format == FP32
    with pytest.raises(ConfigError, match="--block-size that is a multiple of 32"):
        plan((exact, quantized), FP32, kv_dtype="pc4v3", block_size=16)


@pytest.mark.parametrize(
    ("kv_dtype", "d64", "d128", "d256"),
    [
        ("fp32", 512, 1024, 2048),
        ("bf16", 256, 512, 1024),
        ("int8", 132, 260, 516),
        ("fp8", 132, 260, 516),
        ("k8v4", 100, 198, 394),
        ("int4", 68, 136, 272),
        ("k=int4,v=fp8", 100, 198, 394),
        ("pc4v3", 61, 122, 244),
    ],
)
def test_bytes_per_token(kv_dtype, d64, d128, d256):
    """K + V of one token and head, scales included."""
    for dim, expected in ((64, d64), (128, d128), (256, d256)):
        assert plan((LayerShape(1, 1, dim, dim),), kv_dtype=kv_dtype).bytes_per_token == expected
        assert plan((LayerShape(1, 1, dim, dim),), kv_dtype=kv_dtype).bytes_per_token_bf16 == 4 * dim
    smollm2 = {"bf16": 23_040, "int8": 11_880, "fp8": 11_880, "k8v4": 9_000, "int4": 6_120}
    assert plan(kv_dtype=kv_dtype).bytes_per_token == smollm2.get(kv_dtype, 30 * 3 * d64)


@pytest.mark.parametrize(
    ("kv_dtype", "block_size"),
    [(name, size) for name in NAMES for size in ((32, 256) if name == "pc4v3" else (8, 32, 256))],
)
def test_parts_of_a_block_are_aligned_and_do_not_overlap(kv_dtype, block_size):
    dims = ((1, 16, 8), (3, 80, 40), (2, 64, 128)) if kv_dtype == "pc4v3" else ((1, 8, 8), (3, 72, 40), (2, 64, 128))
    layers = tuple(LayerShape(heads, heads, dim, v, 0) for heads, dim, v in dims)
    pools = plan(layers, kv_dtype=kv_dtype, block_size=block_size).pools
    for pool in pools:
        end = 0
        for layer, layout in zip(pool.layers, pool.layouts):
            start, rows = pool.offset(layer), layout.num_kv_heads * block_size
            parts = [
                (0, rows * layout.k_format.code_bytes(layout.k_dim)),
                (layout.k_scales_offset, rows * layout.k_format.scale_bytes(layout.k_dim)),
                (layout.v_codes_offset, rows * layout.v_format.code_bytes(layout.v_dim)),
                (layout.v_scales_offset, rows * layout.v_format.scale_bytes(layout.v_dim)),
            ]
            for offset, nbytes in parts:
                assert (start + offset) % ALIGNMENT == 0
                assert start + offset >= end
                end = start + offset + nbytes
            assert 0 <= (slack := layout.nbytes - block_size * layout.bytes_per_token) < 4 * ALIGNMENT, slack
            assert end <= start + layout.nbytes
        assert end <= pool.block_bytes
        assert pool.block_bytes % ALIGNMENT == 0


def test_a_head_dim_the_format_cannot_hold_is_refused_with_the_layer():
    layers = (LayerShape(4, 4, 64, 64), LayerShape(4, 4, 20, 20))
    for kv_dtype in ("int8", "fp8", "int4", "k=bf16,v=int4"):
        message = refusal(plan, layers, kv_dtype=kv_dtype)
        assert all(word in message for word in ("layer 1", "head_dim 20", "--kv-dtype"))
    assert plan(layers, kv_dtype="bf16").bytes_per_token == 4 * 4 * (64 + 20)


def test_num_blocks_are_the_usable_blocks_and_the_null_block_comes_on_top():
    s = size(num_blocks=10, kv_residual_length=0)
    assert (s.rules[0].num_blocks, s.num_tokens, s.max_model_len) == (10, 320, 320)
    assert s.nbytes == 11 * plan().pools[0].block_bytes
    assert size(GEMMA, num_blocks=10).rules[0].num_blocks == 10


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("layers", [SMOLLM2, GEMMA, GEMMA[:5]], ids=["full", "mixed", "sliding"])
@pytest.mark.parametrize("memory", [20 * MIB, 101 * MIB + 1, 500 * MIB])
def test_kv_memory_is_never_exceeded(memory, layers, kv_dtype):
    for block_size, max_num_seqs in ((16, 1), (32, 8), (256, 3)):
        config = {"kv_dtype": kv_dtype, "block_size": block_size, "max_num_seqs": max_num_seqs}
        p = plan(layers, **config)
        try:
            s = size(layers, kv_memory=memory, free=0, **config)
        except ConfigError:
            continue
        assert s.nbytes <= memory
        assert s.nbytes == sum((r.num_blocks + 1) * pool.block_bytes for r, pool in zip(s.rules, p.pools))
        row = sum(pool.block_bytes for pool in p.pools if not pool.window)
        assert not row or memory - s.nbytes < row, "a block more would have fitted"


def test_memory_that_holds_no_block_is_refused_with_what_is_needed():
    message = refusal(size, kv_memory=1000)
    assert "256.0 MiB are free" in message
    need = float(message.split("at least ")[1].split()[0])
    assert size(kv_memory=round((need + 0.1) * MIB)).num_tokens >= 32


def test_max_model_len_is_lowered_to_what_fits_unless_it_was_asked_for():
    s = size(kv_memory=60 * MIB)
    assert s.max_model_len == s.num_tokens < 8192
    assert size(kv_memory=60 * MIB, max_model_len=s.max_model_len).max_model_len == s.max_model_len
    message = refusal(size, kv_memory=60 * MIB, max_model_len=s.max_model_len + 1)
    assert all(word in message for word in (str(s.max_model_len + 1), f"only {s.rules[0].num_blocks} fit", "60.0 MiB"))
    message = refusal(size, max_model_len=8193)
    assert all(word in message for word in ("8193", "8192"))


def test_by_default_no_more_is_taken_than_the_sequences_can_need():
    s = size(free=10**12, max_num_seqs=2, kv_residual_length=0)
    assert s.num_tokens == 2 * 8192
    assert size(free=60 * MIB).nbytes <= 60 * MIB


def test_bounded_pools_do_not_grow_with_the_length_of_the_model():
    short, long = (size(GEMMA, length=length, num_blocks=4) for length in (32_768, 10**7))
    assert short.rules == long.rules


@pytest.mark.parametrize("layers", [SMOLLM2, GEMMA, GEMMA[:5]], ids=["full", "mixed", "sliding"])
def test_tails_get_an_eighth_of_the_cache_at_most_and_their_blocks_in_bounded_pools(layers):
    p = plan(layers)
    # R 64 and S 4 in blocks of 32 are 3 blocks; a window of 512 is 16.
    assert [pool.tail_blocks(32) for pool in p.pools] == [3 if x.exact else 16 if x.window else 0 for x in p.pools]
    for memory in (150 * MIB, 600 * MIB, 10**11):
        with_tails, without = (size(layers, kv_memory=memory, free=memory, prefix_cache=on) for on in (True, False))
        assert without.num_tails == 0 < with_tails.num_tails <= 64
        assert with_tails.num_tails * p.tail_bytes <= memory // 8
        assert with_tails.nbytes <= memory
        for pool, a, b in zip(p.pools, with_tails.rules, without.rules):
            if pool.window:
                assert a.num_blocks - b.num_blocks == with_tails.num_tails * pool.tail_blocks(32)
    assert size(layers, prefix_tail_memory=10 * p.tail_bytes, free=10**11).num_tails == 10
    assert size(layers, prefix_tail_memory=0, free=10**11).num_tails == 0


def test_tails_do_not_shorten_the_longest_sequence():
    for memory in range(30, 130, 7):
        config = {"kv_memory": memory * MIB, "max_num_seqs": 1}
        on, off = (size(prefix_cache=on, **config).max_model_len for on in (True, False))
        assert on == off
    assert (
        size(kv_memory=60 * MIB, max_num_seqs=1, prefix_tail_memory=20 * MIB).max_model_len
        < size(kv_memory=60 * MIB, max_num_seqs=1).max_model_len
    )


LAYERS = st.lists(st.sampled_from([0, 1, 7, 8, 9, 31, 33, 70]), min_size=1, max_size=3)


@settings(max_examples=150)
@given(st.data())
def test_no_pool_runs_dry_under_any_schedule(data):
    """Every request that was accepted ends, and no step lacks a block in any pool."""
    draw = data.draw
    config = EngineConfig(
        kv_dtype=draw(st.sampled_from(["int8", "bf16"])),
        block_size=draw(st.sampled_from([8, 16])),
        num_blocks=draw(st.integers(1, 30)),
        max_num_seqs=draw(st.integers(1, 5)),
        prefill_chunk=draw(st.integers(1, 60)),
        max_num_batched_tokens=draw(st.integers(5, 60)),
    )
    if config.kv_dtype == "int8":
        config = replace(config, kv_residual_length=draw(st.integers(0, 40)))
    layers = [LayerShape(1, 1, 8, 8, window) for window in draw(LAYERS)]
    if all(layer.window for layer in layers):
        config = replace(config, num_blocks=None)
    s = size_cache(plan_cache(layers, config, BF16), config, 200, 2**40)
    manager = BlockManager(s.rules, config.block_size)
    scheduler = Scheduler(config, manager, s)
    lengths = draw(
        st.lists(st.tuples(st.integers(1, min(200, s.max_model_len)), st.integers(1, 90)), min_size=1, max_size=12)
    )
    left = {}
    for index, (prompt, answer) in enumerate(lengths):
        answer = min(answer, s.max_model_len - prompt)
        if answer > 0:
            left[index] = Request(index, [0] * prompt, SamplingParams(max_tokens=answer))
            scheduler.add(left[index])
    steps = 0
    while left:
        steps += 1
        assert steps < 3000, "no end"
        chunks = scheduler.schedule()
        assert chunks
        assert sum(chunk.end - chunk.start for chunk in chunks) <= config.max_num_batched_tokens
        for chunk in chunks:
            scheduler.advance(chunk)
            if chunk.completes:
                chunk.request.output_token_ids.append(0)
                if len(chunk.request.output_token_ids) == chunk.request.params.max_tokens or draw(st.booleans()):
                    scheduler.finish(left.pop(chunk.request.seq_id), "stop")
        manager.check_integrity()
    assert not scheduler.num_preemptions or any(not rule.bounded for rule in s.rules)
    assert all(pool.num_used == 0 for pool in manager.pools)
