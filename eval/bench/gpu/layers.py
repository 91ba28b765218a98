"""One attention layer over a paged cache of any size, for ``lean.eval.bench_gpu``: its kernels' results and speed."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lean.eval.bench.shape import BLOCK_SIZE, Shape, layouts
from lean.eval.bench.timing import COLD_BYTES, Timing, take_turns
from lean.kernels import reference
from lean.kernels.call import WriteCall
from lean.kernels.layout import KVLayout, blocks_for
from lean.kernels.ops import LayerPool, kv_write, paged_attention

RESIDUAL, EXACT_SINKS = 64, 4  # the engine's defaults
_PATTERN = 256  # blocks of random K and V, repeated over the pool: the speed of a kernel does not depend on the values
Call = Callable[[], object]


def _filled(layout: KVLayout, count: int, dtype: torch.dtype, device: torch.device) -> LayerPool:
    """``count`` blocks of random K and V behind a null block of NaN: a kernel that reads the null block gives NaN."""
    arena = torch.empty(count + 1, layout.nbytes, dtype=torch.uint8, device=device)
    arena[0] = 0xFF
    pool = LayerPool(arena, layout, 0)
    blocks = min(_PATTERN, count)
    slots = torch.arange(BLOCK_SIZE, (blocks + 1) * BLOCK_SIZE, device=device)
    shape = len(slots), layout.num_kv_heads, layout.k_dim
    key, value = (torch.randn(shape, device=arena.device).to(dtype) for _ in range(2))
    kv_write(pool, key, value, slots)
    for first in range(1 + blocks, len(arena), blocks):
        part = arena[first : first + blocks]
        part.copy_(arena[1 : 1 + len(part)])
    return pool


@dataclass(frozen=True)
class Layer:
    """``len(tables)`` sequences of ``context`` tokens each.

    tables, exact_tables: int32 [sequences, blocks]. In ``exact_tables``, blocks outside the residual and the sinks are
    the null block, as in an engine.
    """

    shape: Shape
    context: int
    pool: LayerPool
    exact: LayerPool
    tables: torch.Tensor
    exact_tables: torch.Tensor

    @classmethod
    def random(
        cls, kv_dtype: str, shape: Shape, sequences: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> "Layer":
        """Sequences with random K and V, and block tables in random order."""
        layout, exact_layout = layouts(kv_dtype, shape, dtype)
        blocks = blocks_for(context, BLOCK_SIZE)
        tables = 1 + torch.randperm(sequences * blocks, dtype=torch.int32, device=device).view(sequences, blocks)
        live = sorted({0, *range(max(0, blocks - 1 - blocks_for(RESIDUAL, BLOCK_SIZE)), blocks)})
        exact_tables = torch.zeros_like(tables)
        exact_tables[:, live] = 1 + torch.randperm(sequences * len(live), dtype=torch.int32, device=device).view(
            sequences, -1
        )
        pool = _filled(layout, sequences * blocks, dtype, device)
        exact = _filled(exact_layout, sequences * len(live), dtype, device)
        return cls(shape, context, pool, exact, tables, exact_tables)

    def call(self, rows: int, sequences: slice, residual: bool, dtype: torch.dtype, **rule: Any) -> Call:
        """Attention of the last ``rows`` tokens of each sequence in the slice."""
        tables, device = self.tables[sequences], self.tables.device
        count = len(tables)
        query = torch.randn(count * rows, self.shape.num_q_heads, self.shape.head_dim, device=device).to(dtype)
        starts = torch.arange(0, count * rows + 1, rows, dtype=torch.int32, device=device)
        lengths = torch.full((count,), self.context, dtype=torch.int32, device=device)
        if residual:
            rule |= {"exact": self.exact, "exact_block_tables": self.exact_tables[sequences]}
            rule |= {"residual_length": RESIDUAL, "num_exact_sinks": EXACT_SINKS}
        scale = self.shape.head_dim**-0.5
        return partial(paged_attention, query, self.pool, tables, starts, lengths, scale=scale, **rule)

    def bytes_read(self, residual: bool) -> int:
        """Bytes of K and V, scales included, that a decode step of one sequence reads."""
        exact = min(self.context, RESIDUAL + EXACT_SINKS) if residual else 0
        return (self.context - exact) * self.pool.layout.bytes_per_token + exact * self.exact.layout.bytes_per_token


def as_one(calls: Sequence[Call], device: torch.device) -> Call:
    """One call that makes all of ``calls``: on a GPU a CUDA graph, so that launches cost no host time."""
    if device.type == "cpu":
        return lambda: [call() for call in calls]
    for call in calls:  # compiles
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


@torch.inference_mode()
def worst_error(kv_dtype: str, shape: Shape, rule: str, context: int, device: torch.device) -> float:
    """Largest difference of bf16 attention from float64 attention over the same cache, relative to the largest output.

    One step holds two decodes and a prefill chunk. The result is infinite where `kv_write` and the reference wrote
    different bytes.

    rule: ``plain``, ``residual``, or ``everything``: residual, window, sinks, soft cap and sink logits.
    """
    torch.manual_seed(0)
    dtype, rows = torch.bfloat16, 9
    layer = Layer.random(kv_dtype, shape, 3, context, dtype, device)
    key, value = (torch.randn(9, shape.num_kv_heads, shape.head_dim, device=device).to(dtype) for _ in range(2))
    slots = torch.arange(40, 49, device=device)
    theirs = layer.pool.arena.clone()
    reference.kv_write(WriteCall(theirs, key, value, slots, 0, BLOCK_SIZE, *layer.pool.codes))
    kv_write(layer.pool, key, value, slots)
    if not torch.equal(theirs, layer.pool.arena):
        return float("inf")
    num_heads = shape.num_q_heads
    query, query_sink = (torch.randn(rows + 2, num_heads, shape.head_dim, device=device).to(dtype) for _ in range(2))
    extra: dict[str, Any] = {}
    if rule != "plain":
        extra |= {"exact": layer.exact, "exact_block_tables": layer.exact_tables}
        extra |= {"residual_length": RESIDUAL - rows, "num_exact_sinks": EXACT_SINKS}
    if rule == "everything":
        extra |= {"window": context // 2, "num_sink_tokens": EXACT_SINKS, "softcap": 5.0, "query_sink": query_sink}
        extra["sink_logits"] = torch.linspace(-1, 3, num_heads, device=device)
    starts = torch.tensor([0, 1, 2, rows + 2], dtype=torch.int32, device=device)
    lengths = torch.tensor([context, 1, context], dtype=torch.int32, device=device)

    def attend(dtype: torch.dtype) -> torch.Tensor:
        options = {name: x.to(dtype) if name == "query_sink" else x for name, x in extra.items()}
        scale = shape.head_dim**-0.5
        return paged_attention(query.to(dtype), layer.pool, layer.tables, starts, lengths, scale=scale, **options)

    found = attend(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "float64 has no GPU kernel")
        wanted = attend(torch.float64)  # by the reference
    worst = ((found.double() - wanted).abs().max() / wanted.abs().max()).item()
    return worst if worst == worst else float("inf")


def _sdpa(layer: Layer, rows: int, batch: int, copies: int) -> list[Call]:
    """torch's attention over bf16 K and V of the same size.

    In decode, the query heads of one KV head are rows of one product, so that K and V are read once.
    """
    (num_q_heads, num_kv_heads, dim), device = layer.shape, layer.tables.device
    group, attend = num_q_heads // num_kv_heads, torch.nn.functional.scaled_dot_product_attention

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, dim, dtype=torch.bfloat16, device=device)

    pairs = [(draw(num_kv_heads, layer.context), draw(num_kv_heads, layer.context)) for _ in range(copies)]
    if rows == 1:
        query = draw(num_kv_heads, group)
        return [partial(attend, query, *pair) for pair in pairs]
    query = draw(num_q_heads, rows)
    causal = rows == layer.context
    return [partial(attend, query, *pair, is_causal=causal, enable_gqa=group > 1) for pair in pairs]


@torch.inference_mode()
def decode_times(
    kv_dtype: str, shape: Shape, batch: int, context: int, device: torch.device, rounds: int
) -> dict[str, tuple[Timing, int]]:
    """Time of a decode step of ``batch`` sequences, and the bytes it reads, by contender.

    Contenders: the format, the format with residual (``+R``) and lean's bf16; with bf16 also torch's attention. They
    take turns; the copies of each are larger than the L2 cache.
    """
    dtype, calls, nbytes = torch.bfloat16, {}, {}
    for name in dict.fromkeys(("bf16", kv_dtype)):
        bytes_each = batch * context * 2 * shape.num_kv_heads * shape.head_dim
        copies = max(1, -(-COLD_BYTES // bytes_each)) if device.type != "cpu" else 1
        layer = Layer.random(name, shape, copies * batch, context, dtype, device)
        for residual in (False, True) if name != "bf16" else (False,):
            steps = [layer.call(1, slice(i * batch, (i + 1) * batch), residual, dtype) for i in range(copies)]
            label = name + "+R" * residual
            calls[label], nbytes[label] = (steps, copies), batch * layer.bytes_read(residual)
        if kv_dtype == "bf16":
            calls["torch SDPA"], nbytes["torch SDPA"] = (_sdpa(layer, 1, batch, copies), copies), nbytes["bf16"]
    timings = take_turns({name: as_one(steps, device) for name, (steps, _) in calls.items()}, rounds)
    return {
        name: (replace(timing, median=timing.median / calls[name][1]), nbytes[name]) for name, timing in timings.items()
    }


@torch.inference_mode()
def prefill_times(
    kv_dtype: str, shape: Shape, rows: int, context: int, device: torch.device, rounds: int
) -> tuple[dict[str, Timing], float]:
    """(time by contender, floating-point operations of the products) of the last ``rows`` rows of a sequence.

    Contenders: the format, with residual where it is quantized; with bf16 and a chunk that is the whole sequence also
    torch's attention.
    """
    layer = Layer.random(kv_dtype, shape, 1, context, torch.bfloat16, device)
    quantized = layer.pool.layout.k_format.quantized
    calls = {kv_dtype + "+R" * quantized: [layer.call(rows, slice(0, 1), quantized, torch.bfloat16)]}
    if kv_dtype == "bf16" and rows == context:
        calls["torch SDPA"] = _sdpa(layer, rows, 1, 1)
    keys = rows * context - rows * (rows - 1) // 2
    flop = 4.0 * shape.num_q_heads * shape.head_dim * keys
    return take_turns({name: as_one(steps, device) for name, steps in calls.items()}, rounds), flop
