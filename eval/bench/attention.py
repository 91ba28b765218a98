"""``lean bench attention``: one decode step of one layer, on K and V that the CPU's caches do not hold."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lean.errors import ConfigError
from lean.eval.bench.memory import COLD_BYTES, read_bandwidth
from lean.eval.bench.replay import time_calls
from lean.eval.bench.shape import BLOCK_SIZE, Shape, layouts
from lean.eval.bench.timing import BenchRow, rows_beside_peers
from lean.kernels.layout import blocks_for
from lean.kernels.ops import LayerPool, paged_attention, write_tokens
from lean.kernels.serving import is_recordable, needs_of
from lean.quant import CHANNEL_TOKENS, parse_kv_dtype

PEERS = ("sdpa", "sdpa-folded")


def _parts(shape: Shape, context: int, k_dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """Random K and V [2, tokens, num_kv_heads, head_dim], in pieces of at most 4,096 tokens."""
    generator = torch.Generator(device=device).manual_seed(0)
    for start in range(0, context, 4096):
        count = min(4096, context - start)
        yield torch.randn(2, count, shape.num_kv_heads, shape.head_dim, generator=generator, device=device).to(k_dtype)


def lean_calls(
    kv_dtype: str, residual: int, shape: Shape, context: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Callable[[], object]], int]:
    """Decode steps of one sequence in lean's cache.

    Returns:
        (calls, bytes that one call reads). Each call reads another copy of the cache; all copies together are larger
        than the CPU's caches, so that every call reads memory.
    """
    layout, exact_layout = layouts(kv_dtype, shape, dtype)
    blocks = blocks_for(context, BLOCK_SIZE)
    copies = max(2, -(-COLD_BYTES // (blocks * layout.nbytes)))
    order = torch.randperm(copies * blocks, generator=torch.Generator().manual_seed(0)).int() + 1
    tables = order.view(copies, blocks).to(device)
    arena = torch.zeros(copies * blocks + 1, layout.nbytes, dtype=torch.uint8, device=device)
    pool = LayerPool(arena, layout, 0)
    exact = LayerPool(torch.zeros(blocks + 1, exact_layout.nbytes, dtype=torch.uint8, device=device), exact_layout, 0)
    exact_table = torch.arange(1, blocks + 1, dtype=torch.int32, device=device)[None]
    position = 0
    for key, value in _parts(shape, context, dtype, device):
        where = torch.arange(position, position + len(key), device=device)
        slots, exact_slots = (
            table[where // BLOCK_SIZE].long() * BLOCK_SIZE + where % BLOCK_SIZE for table in (tables[0], exact_table[0])
        )
        write_tokens(pool, key, value[..., : shape.v_dim], slots, exact, exact_slots)
        position += len(key)
    for copy in range(1, copies):
        arena[tables[copy].long()] = arena[tables[0].long()]
    query = torch.randn(1, shape.num_q_heads, shape.head_dim, device=device).to(dtype)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    lengths = torch.tensor([context], dtype=torch.int32, device=device)
    extra: dict[str, Any] = {}
    if residual:
        extra = {
            "exact": exact,
            "exact_block_tables": exact_table,
            "residual_length": residual,
            "num_exact_sinks": min(4, residual),
        }

    def call(table: torch.Tensor) -> Callable[[], object]:
        return lambda: paged_attention(query, pool, table, starts, lengths, scale=shape.head_dim**-0.5, **extra)

    quantized = max(0, context - residual - min(4, residual))
    nbytes = quantized * layout.bytes_per_token + (context - quantized) * exact_layout.bytes_per_token
    return [call(tables[copy : copy + 1]) for copy in range(copies)], nbytes


def sdpa_calls(folded: bool, shape: Shape, context: int, device: torch.device) -> list[Callable[[], object]]:
    """PyTorch's attention over bf16 K/V, one call per copy as in `lean_calls`.

    ``folded``: the query heads of one KV head become rows of one product, so that K and V are read once.
    """
    nbytes = 2 * 2 * context * shape.num_kv_heads * shape.head_dim
    copies = max(2, -(-COLD_BYTES // nbytes))
    group = shape.num_q_heads // shape.num_kv_heads
    first = torch.cat(list(_parts(shape, context, torch.bfloat16, device)), dim=1).transpose(1, 2).contiguous()
    pairs = [first.clone() for _ in range(copies)]
    query = torch.randn(1, shape.num_q_heads, 1, shape.head_dim, device=device).to(torch.bfloat16)

    def call(pair: torch.Tensor) -> Callable[[], object]:
        key = pair[0][None]
        value = key[..., : shape.v_in_k] if shape.v_in_k else pair[1][None]
        if folded:
            rows = query.view(1, shape.num_kv_heads, group, shape.head_dim)
            return lambda: torch.nn.functional.scaled_dot_product_attention(rows, key, value)
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return [call(pair) for pair in pairs]


def _recordable(contender: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a CUDA graph can record a contender: all that the torch reference does not serve."""
    if device.type == "cpu" or contender in PEERS:
        return device.type != "cpu"
    layout, _ = layouts(contender.split(" R ")[0], shape, dtype)
    return is_recordable(device, needs_of([layout], dtype))


def _residuals(kv_dtype: str, wanted: Sequence[int]) -> list[int]:
    """The residuals to measure: none for an exact cache, and those that hold a group where K is encoded in groups."""
    k_format, v_format = parse_kv_dtype(kv_dtype)
    if not k_format.quantized and not v_format.quantized:
        return [0]
    least = CHANNEL_TOKENS if k_format.by_channel else 0
    if not (measured := [one for one in wanted if one >= least]):
        raise ConfigError(f"{kv_dtype} needs a residual of at least {least} tokens: add one to --residual")
    return measured


def bench_attention(
    shape: Shape,
    contexts: Sequence[int],
    kv_dtypes: Sequence[str],
    residuals: Sequence[int],
    peers: Sequence[str],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = 9,
) -> Iterator[BenchRow]:
    """Decode attention of one sequence per format and context. In its turn, a contender reads all of its copies.

    On a GPU a turn replays CUDA graphs, as decode steps do: the kernels are timed, not their launches from Python.
    """
    top = read_bandwidth(device)
    for context in contexts:
        made = {}
        for name in kv_dtypes:
            for residual in _residuals(name, residuals):
                made[f"{name} R {residual}" if residual else name] = lean_calls(
                    name, residual, shape, context, dtype, device
                )
        calls = {name: calls for name, (calls, _) in made.items()}
        calls |= {peer: sdpa_calls(peer == "sdpa-folded", shape, context, device) for peer in peers}
        eager = [name for name in calls if not _recordable(name, shape, dtype, device)]
        timings = time_calls(calls, device, rounds, eager)

        def row(name: str, made=made, timings=timings, context=context, **figures) -> BenchRow:  # type: ignore[no-untyped-def]
            speed = made[name][1] / timings[name].median
            return BenchRow(
                "attention", name, *shape[:3], context, torch.get_num_threads(), **figures,
                gb_s=speed / 1e9, bandwidth_share=speed / top if top else None,
            )  # fmt: skip

        yield from rows_beside_peers(row, timings, list(made), list(peers))
