"""One attention layer over a paged cache of any size, for ``lean.eval.bench_gpu``: its kernels' results and speed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from lean.engine.cuda_graphs import CudaGraphs, Recorder
from lean.eval.bench.memory import COLD_BYTES
from lean.eval.bench.replay import Call, time_calls
from lean.eval.bench.shape import BLOCK_SIZE, Shape, layouts
from lean.eval.bench.timing import Timing
from lean.kernels import reference
from lean.kernels.call import WriteCall
from lean.kernels.layout import KVLayout, blocks_for
from lean.kernels.ops import LayerPool, kv_write, paged_attention

RESIDUAL, EXACT_SINKS = 64, 4  # the engine's defaults
_PATTERN = 256  # blocks of random K and V, repeated over the pool: the speed of a kernel does not depend on the values
_CHUNK = 9  # rows of a prompt's chunk in the checks


def _filled(layout: KVLayout, count: int, dtype: torch.dtype, device: torch.device) -> LayerPool:
    """``count`` blocks of random K and V behind a null block of NaN: a kernel that reads the null block gives NaN."""
    arena = torch.empty(count + 1, layout.nbytes, dtype=torch.uint8, device=device)
    arena[0] = 0xFF
    pool = LayerPool(arena, layout, 0)
    blocks = min(_PATTERN, count)
    slots = torch.arange(BLOCK_SIZE, (blocks + 1) * BLOCK_SIZE, device=device)
    shape = len(slots), layout.num_kv_heads, layout.k_dim
    key, value = (torch.randn(shape, device=arena.device).to(dtype) for _ in range(2))
    kv_write(pool, key, value[..., : layout.v_dim], slots)
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
        # One block more than the last row sees: the residual of a chunk's first row begins before.
        live = sorted({0, *range(max(0, blocks - 2 - blocks_for(RESIDUAL, BLOCK_SIZE)), blocks)})
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


@dataclass(frozen=True)
class _Step:
    """Query rows of a step over a layer's sequences, and the rule of what they see.

    query, query_sink: [rows, num_q_heads, head_dim], bf16. starts: int32 [sequences + 1]. lengths: int32 [sequences].
    """

    layer: Layer
    query: torch.Tensor
    query_sink: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    rule: dict[str, Any]

    @classmethod
    def random(cls, layer: Layer, rule: str, counts: Sequence[int], dtype: torch.dtype) -> "_Step":
        """``counts`` rows of three sequences: one of all tokens, one of a single token, one of all tokens."""
        device, shape = layer.tables.device, layer.shape
        rows = sum(counts), shape.num_q_heads, shape.head_dim
        query, query_sink = (torch.randn(rows, device=device).to(dtype) for _ in range(2))
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
        lengths = torch.tensor([layer.context, 1, layer.context], dtype=torch.int32, device=device)
        extra: dict[str, Any] = {}
        if rule != "plain":
            extra |= {"exact": layer.exact, "exact_block_tables": layer.exact_tables}
            extra |= {"residual_length": RESIDUAL, "num_exact_sinks": EXACT_SINKS}
        if rule == "everything":
            extra |= {"window": layer.context // 2, "num_sink_tokens": EXACT_SINKS, "softcap": 5.0}
            extra |= {"query_sink": query_sink, "sink_logits": torch.linspace(-1, 3, rows[1], device=device)}
        return cls(layer, query, query_sink, starts, lengths, extra)

    def attend(self, dtype: torch.dtype) -> torch.Tensor:
        layer = self.layer
        options = {name: x.to(dtype) if name == "query_sink" else x for name, x in self.rule.items()}
        scale = layer.shape.head_dim**-0.5
        return paged_attention(
            self.query.to(dtype), layer.pool, layer.tables, self.starts, self.lengths, scale=scale, **options
        )

    def error(self, found: torch.Tensor) -> float:
        """Largest difference of ``found`` from float64 attention, relative to the largest output."""
        wanted = self.attend(torch.float64)  # by the reference
        worst = ((found.double() - wanted).abs().max() / wanted.abs().max()).item()
        return worst if worst == worst else float("inf")


class _Tokens:
    """K and V of new tokens, and where they go in the quantized pool of a layer."""

    def __init__(self, layer: Layer, slots: torch.Tensor, dtype: torch.dtype) -> None:
        shape = len(slots), layer.shape.num_kv_heads, layer.shape.head_dim
        self.pool, self.slots = layer.pool, slots
        self.key, value = (torch.randn(shape, device=slots.device).to(dtype) for _ in range(2))
        self.value = value[..., : layer.shape.v_dim].contiguous()

    def write(self) -> None:
        kv_write(self.pool, self.key, self.value, self.slots)

    def by_reference(self) -> torch.Tensor:
        """The arena as it must be after `write`."""
        arena = self.pool.arena.clone()
        v_in_k = self.pool.layout.v_in_k
        reference.kv_write(WriteCall(arena, self.key, self.value, self.slots, 0, BLOCK_SIZE, *self.pool.codes, v_in_k))
        return arena


@torch.inference_mode()
def step_errors(
    kv_dtype: str, shape: Shape, rule: str, context: int, device: torch.device, record: Recorder | None = None
) -> dict[str, float]:
    """Largest difference of bf16 attention from float64 attention over the same cache, relative to the largest output.

    It is infinite where `kv_write` and the reference wrote different bytes.

    rule: ``plain``, ``residual``, or ``everything``: residual, window, sinks, soft cap and sink logits.
    record: makes a step that runs again without Python; by default CUDA graphs, on a CPU none.

    Returns:
        By step: ``chunk``, two decodes and a chunk of a prompt; ``decode``, a row of each of three sequences; where
        steps are recorded, ``replayed``: a decode step with its writes, replayed on other tokens.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16
    layer = Layer.random(kv_dtype, shape, 3, context, dtype, device)
    first = _Tokens(layer, torch.arange(40, 40 + _CHUNK, device=device), dtype)
    arena = first.by_reference()
    first.write()
    chunk, decode = (_Step.random(layer, rule, (1, 1, rows), dtype) for rows in (_CHUNK, 1))
    if not torch.equal(arena, layer.pool.arena):
        return {"chunk": float("inf")}
    errors = {name: step.error(step.attend(dtype)) for name, step in (("chunk", chunk), ("decode", decode))}
    record = CudaGraphs(device) if record is None and device.type == "cuda" else record
    if record is not None:
        errors["replayed"] = _replayed_error(decode, record, dtype)
    return errors


def _replayed_error(step: _Step, record: Recorder, dtype: torch.dtype) -> float:
    last = step.lengths.long() - 1
    blocks = step.layer.tables.long().gather(1, last[:, None] // BLOCK_SIZE)[:, 0]
    tokens = _Tokens(step.layer, blocks * BLOCK_SIZE + last % BLOCK_SIZE, dtype)

    def run() -> torch.Tensor:
        tokens.write()
        return step.attend(dtype)

    replay = record(run)
    for inputs in (tokens.key, tokens.value, step.query, step.query_sink):
        inputs.copy_(torch.randn_like(inputs))
    arena = tokens.by_reference()
    found = replay()
    return step.error(found) if torch.equal(arena, tokens.pool.arena) else float("inf")


def _sdpa(layer: Layer, rows: int, batch: int, copies: int) -> list[Call]:
    """torch's attention over bf16 K and V of the same size.

    In decode, the query heads of one KV head are rows of one product, so that K and V are read once.
    """
    (num_q_heads, num_kv_heads, dim), device = layer.shape[:3], layer.tables.device
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
    kv_dtype: str, shape: Shape, batch: int, context: int, device: torch.device, rounds: int, rules: Sequence[str]
) -> dict[str, tuple[Timing, int]]:
    """Time of a decode step of ``batch`` sequences, and the bytes it reads, by contender.

    Contenders: the format under each rule, ``plain`` or ``residual`` (``+R``), and lean's bf16; with bf16 also torch's
    attention. They take turns; the copies of each are larger than the L2 cache.
    """
    dtype, calls, nbytes = torch.bfloat16, dict[str, list[Call]](), dict[str, int]()
    for name in dict.fromkeys(("bf16", kv_dtype)):
        bytes_each = batch * context * 2 * shape.num_kv_heads * shape.head_dim
        copies = max(1, -(-COLD_BYTES // bytes_each)) if device.type != "cpu" else 1
        layer = Layer.random(name, shape, copies * batch, context, dtype, device)
        for residual in [rule == "residual" for rule in rules] if name != "bf16" else [False]:
            steps = [layer.call(1, slice(i * batch, (i + 1) * batch), residual, dtype) for i in range(copies)]
            label = name + "+R" * residual
            calls[label], nbytes[label] = steps, batch * layer.bytes_read(residual)
        if kv_dtype == "bf16":
            calls["torch SDPA"], nbytes["torch SDPA"] = _sdpa(layer, 1, batch, copies), nbytes["bf16"]
    return {name: (timing, nbytes[name]) for name, timing in time_calls(calls, device, rounds).items()}


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
    return time_calls(calls, device, rounds), flop
