"""Under a window memory is constant, and neither old blocks nor a thousand evictions change a row."""

import sys

import pytest
import resident
import torch
from engine_state import block_table, blocks_in_use, hold, positions_from, request_ids
from tiny import tokens
from windowed import IDS, hidden, loader, residual, same, start

from lean import LLM, SamplingParams
from lean.kernels.parts import read_slots
from lean.report import kv_report


@pytest.fixture(scope="module")
def model(tiny):
    return loader(tiny)


@pytest.mark.parametrize(
    ("kv_dtype", "sinks", "length"), [("int8", 4, 16), ("fp8", 40, 0), ("k8v4", 0, 64), ("int4", 4, 100)]
)
def test_blocks_in_use_are_constant_once_the_window_is_full(model, kv_dtype, sinks, length):
    """The number of blocks stays constant and within the bytes of the plan at any length."""
    options = {"window": 64, "sinks": sinks, "max_num_seqs": 1, **residual(kv_dtype, length)}
    llm = start(model("llama"), kv_dtype, prefill_chunk=32, **options)
    request_id = llm.add_request(tokens(3000), keep_hidden=True)
    used = []
    while llm.has_work:
        llm.step()
        used.append(blocks_in_use(llm))
    assert request_id not in request_ids(llm)
    full = used[8:-2]
    assert len(set(full)) == 1
    assert sum(n * pool.block_bytes for n, pool in zip(full[0], llm.plan.pools)) <= llm.plan.bytes_at(2**31)
    # In decode the number of blocks goes up and down by one, never further.
    llm = start(model("llama"), kv_dtype, block_size=8, **options)
    llm.add_request(tokens(200), SamplingParams(100, ignore_eos=True))
    counts = []
    while llm.has_work:
        llm.step()
        counts.append(blocks_in_use(llm))
    for own in zip(*counts[3:-1]):
        assert max(own) - min(own) <= 1
    assert llm.peak_use.bytes_held <= llm.size.nbytes


def test_window_and_quantization_save_memory_together(model):
    """The savings of both options multiply, up to block rounding."""
    held = {}
    for kv_dtype in ("fp32", "int8"):
        for window in (None, 60):
            llm = start(model("llama, 2 layers"), kv_dtype, window=window, prefill_chunk=32, **residual(kv_dtype, 0))
            hold(llm, tokens(480))
            held[kv_dtype, window] = llm.stats().bytes_held
            [pool] = kv_report(llm)["pools"]
            assert (pool["format"], pool["window"]) == (kv_dtype, window or 0)
    by_format = held["fp32", None] / held["int8", None]
    by_window = held["fp32", None] / held["fp32", 60]
    assert by_format == pytest.approx(64 / 18, rel=0.01)
    assert by_window >= 480 / (60 + 2 * 32 + 32)  # a window may touch one block more on each side, sinks one
    assert held["fp32", None] / held["int8", 60] == pytest.approx(by_format * by_window, rel=0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_the_workspace_does_not_grow_with_the_prompt_under_a_window(model):
    """A mask of all pairs alone would take 256 MiB here, a chunk's scores 128 MiB."""
    llm = start(model("llama"), "int8", window=64, deterministic=False, max_num_seqs=1)
    for _ in llm.hidden_states(tokens(2048)):  # some memory is allocated once, at first use
        pass
    ids = tokens(16_384)
    resident.restart_peak()
    before = resident.now()
    for _ in llm.hidden_states(ids):
        pass
    assert resident.peak() - before < 32 * 2**20
    assert llm.size.nbytes < 2**20


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8", "k8v4", "int4"])
@pytest.mark.parametrize("name", ["llama, 2 layers", "gemma3, mixed"])
def test_what_the_cache_held_before_does_not_matter_under_a_window(model, name, kv_dtype):
    """0x7F bytes are NaN in e4m3 and fp16, all ones in every float; evicted blocks are taken again and again."""
    for window, sinks, length in [(33, 4, 16), (20, 40, 0)]:
        found = []
        for pattern in (0, 0x7F7F, -1):
            options = {"window": window, "sinks": sinks, "prefill_chunk": 50, "block_size": 8}
            llm = start(model(name), kv_dtype, **options, **residual(kv_dtype, length))
            for arena in llm.cache.arenas:
                arena.view(torch.int16).fill_(pattern)
            found.append(torch.cat([hidden(llm, IDS), hidden(llm, IDS[:3]), hidden(llm, IDS[90:])]))
        assert all(same(rows, found[0]) for rows in found)


# --- no drift ---


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("length", [0, 16])
def test_a_thousand_evictions_move_no_visible_key(model, kv_dtype, length):
    """Keys are written once: sinks and the oldest keys of the window hold the bytes first written."""
    window, sinks, count = 64, 4, 1_100
    options = {"window": window, "sinks": sinks, "block_size": 8, "kv_residual_length": length}
    ids = tokens(count)

    def stored(llm: LLM, ids: list[int], positions: list[int], pool: int) -> torch.Tensor:
        request_id = hold(llm, ids)
        table = block_table(llm, request_id, pool)
        assert all(table[p // 8] for p in positions)
        slots = torch.tensor([table[p // 8] * 8 + p % 8 for p in positions])
        layer = llm.cache.layers[0]
        own = layer.pool if pool == layer.group.pool_id else layer.exact
        rows = torch.cat(read_slots(own.arena, own.layout, own.offset, slots), dim=-1)
        llm.abort(request_id)
        return rows

    llm = start(model("llama"), kv_dtype, prefill_chunk=100, **options)
    pool = 1 if length else 0  # with a residual the sinks are kept exact
    first_written = stored(llm, ids[:6], list(range(sinks)), pool)
    assert same(stored(llm, ids, list(range(sinks)), pool), first_written)
    oldest = [count - window, count - window + 1, count - window + 2]
    late = stored(llm, ids, oldest, 0)
    with positions_from(llm, oldest[0]):
        assert same(stored(llm, ids[oldest[0] :][:3], [0, 1, 2], 0), late)


@pytest.mark.parametrize(("kv_dtype", "length"), [("int8", 0), ("fp8", 0), ("int4", 0), ("int4", 16)])
def test_rows_behind_a_thousand_evictions_are_as_accurate_as_the_first(model, kv_dtype, length):
    """The error against the exact cache does not grow."""
    options = {"window": 64, "sinks": 4, "prefill_chunk": 256}
    ids = tokens(1_200)
    exact = hidden(start(model("llama"), **options), ids)
    error = (hidden(start(model("llama"), kv_dtype, **options, kv_residual_length=length), ids) - exact).norm(dim=1)
    early, late = error[68:268].mean(), error[1000:].mean()
    assert 0 < late < 1.25 * early


def test_the_same_tokens_far_away_give_the_same_rows(model):
    """Attention depends on distances: moving a text by 5,000,000 positions changes only rounding."""
    llm, found = start(model("llama, 2 layers"), "fp32", window=40), []
    for offset in (0, 5_000_000):
        with positions_from(llm, offset):
            found.append(hidden(llm, IDS))
    assert (found[0] - found[1]).abs().max() < 1e-4
