"""From the ops' arguments to kernel launches: which kernel, which grid, which arguments. Nothing here asks the device.

Grids follow from shapes alone (rows, sequences, width of the block tables), so that a step can be captured into a CUDA
graph; no launch depends on a value in device memory.
"""

import math
from typing import Any, NamedTuple

import torch

from lean.kernels.call import AttentionCall, WriteCall
from lean.kernels.layout import KVLayout
from lean.kernels.triton.common import FORMAT_CODES
from lean.kernels.triton.decode import decode, merge
from lean.kernels.triton.kv_write import kv_write
from lean.kernels.triton.parameters import DecodeParameters, Target, decode_parameters, prefill_parameters
from lean.kernels.triton.prefill import prefill, turn_query
from lean.quant import KVFormat
from lean.quant.rotation import rotation_size

LOG2E = 1.4426950408889634
# Parts of at most this many bytes are held at once; more rows take several launches. A multiple of what any decode step
# needs, it bounds only prefills that go through the decode kernel.
MAX_PARTS_BYTES = 256 << 20


class Launch(NamedTuple):
    """One kernel launch, not yet made."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.options)


def unsupported(k_format: KVFormat, v_format: KVFormat, k_dim: int, v_dim: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot serve a cache of these formats, or None."""
    for fmt, dim in ((k_format, k_dim), (v_format, v_dim)):
        if fmt.name not in FORMAT_CODES:
            return f"{fmt.name} has no GPU kernel"
        if fmt.group_size and dim % fmt.group_size:
            return f"{fmt.name} with head_dim {dim}, which is no multiple of {fmt.group_size}, has no GPU kernel"
    if max(k_dim, v_dim) > 256:
        return f"head_dim {max(k_dim, v_dim)} is more than the GPU kernels' 256"
    if dtype is torch.float64:
        return "float64 has no GPU kernel"
    return None


def _bits(x: torch.Tensor) -> torch.Tensor:
    """bf16 as its int16 bits, see `common.load_float`."""
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def _contiguous_dims(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rotation(fmt: KVFormat, dim: int) -> tuple[int, float]:
    if not fmt.rotate:
        return 0, 1.0
    size = rotation_size(dim)
    return size.bit_length() - 1, 1.0 / math.sqrt(size)


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _base(arena: torch.Tensor, offset: int) -> torch.Tensor:
    """The arena from the layer's part of block 0 on; its data pointer keeps the alignment of 16 bytes."""
    return arena.view(-1)[offset:] if arena.is_contiguous() else arena[0, offset:]


def _formats(layout: KVLayout, target: Target, query_dtype: torch.dtype) -> tuple:
    """The FORMATS of the kernels: codes of the two formats, dtypes of their products, bytes of codes and scales of a
    vector."""
    k, v = layout.k_format, layout.v_format

    def compute(fmt: KVFormat) -> int:
        name = fmt.name if not fmt.quantized else "fp16"
        if query_dtype is torch.float32 or name == "fp32" or (name == "bf16" and not target.has_bf16):
            name = "fp32"
        return FORMAT_CODES[name]

    return (
        FORMAT_CODES[k.name],
        FORMAT_CODES[v.name],
        compute(k),
        compute(v),
        k.code_bytes(layout.k_dim),
        v.code_bytes(layout.v_dim),
        k.scale_bytes(layout.k_dim),
        v.scale_bytes(layout.v_dim),
    )


def plan_kv_write(call: WriteCall, target: Target) -> list[Launch]:
    arena, key, value, slot_mapping, layer_offset, block_size, _, _ = call
    num_tokens, num_kv_heads, k_dim = key.shape
    v_dim = value.shape[2]
    layout = call.layout
    k, v = layout.k_format, layout.v_format
    num_vectors = num_tokens * num_kv_heads
    if not num_vectors:
        return []
    key, value = _contiguous_dims(key), _contiguous_dims(value)
    # About 2,048 elements a program: 16 a thread, of which a butterfly needs twice as many registers.
    rows = max(1, 2048 // _padded(max(k_dim, v_dim)))
    arguments = {
        "base": _base(arena, layer_offset),
        "key": _bits(key),
        "value": _bits(value),
        "slot_mapping": slot_mapping,
        "num_vectors": num_vectors,
        "key_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        "block_stride": arena.stride(0),
        "k_scales_offset": layout.k_scales_offset,
        "v_codes_offset": layout.v_codes_offset,
        "v_scales_offset": layout.v_scales_offset,
        "X_BF16": key.dtype is torch.bfloat16,
        "NUM_KV_HEADS": num_kv_heads,
        "K_FORMAT": FORMAT_CODES[k.name],
        "V_FORMAT": FORMAT_CODES[v.name],
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "K_PADDED": _padded(k_dim),
        "V_PADDED": _padded(v_dim),
        "K_BYTES": k.code_bytes(k_dim),
        "V_BYTES": v.code_bytes(v_dim),
        "K_SCALE_BYTES": k.scale_bytes(k_dim),
        "V_SCALE_BYTES": v.scale_bytes(v_dim),
        "K_ROTATION": _rotation(k, k_dim),
        "V_ROTATION": _rotation(v, v_dim),
        "BLOCK_SIZE": block_size,
        "ROWS": rows,
    }
    return [
        Launch(kv_write, (-(-num_vectors // rows), 2), arguments, target.options(num_warps=4, num_stages=1, fuse=False))
    ]


def plan_paged_attention(call: AttentionCall, target: Target) -> tuple[torch.Tensor, list[Launch]]:
    """The output, and the launches that fill it.

    Sequences of one row go through `decode`, the others through `prefill`; where there can be no others, every row is
    a program of `decode`, rows of no sequence included.
    """
    (
        query, query_sink, arena, block_tables, exact_arena, exact_block_tables, query_start_loc, seq_lens, sink_logits,
        layer_offset, exact_layer_offset, block_size, num_kv_heads, v_dim, _, _, _, _, scale, softcap, window,
        num_sink_tokens, residual_length, num_exact_sinks,
    ) = call  # fmt: skip
    num_rows, num_q_heads, k_dim = query.shape
    num_seqs = seq_lens.shape[0]
    group = num_q_heads // num_kv_heads
    layout, exact_layout = call.layout, call.exact_layout
    if not num_rows or not num_seqs:
        return query.new_zeros(num_rows, num_q_heads, v_dim), []
    query = _contiguous_dims(query)
    query_sink = query if query_sink is None else _contiguous_dims(query_sink)
    k, v = layout.k_format, layout.v_format
    has_sinks, has_residual = num_sink_tokens > 0, residual_length > 0
    rule = (
        window > 0,
        has_sinks,
        has_sinks and (not has_residual or num_exact_sinks < num_sink_tokens),
        has_residual,
        softcap > 0,
    )
    halves = [2 if fmt.bits == 4 else 1 for fmt in (k, v)]  # see `common.dim_of`
    exact_tables = block_tables if exact_block_tables is None else exact_block_tables
    exact_pool = arena if exact_arena is None else exact_arena
    common = {
        "query": _bits(query),
        "query_sink": _bits(query_sink),
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "num_seqs": num_seqs,
        "query_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "sink_stride": query_sink.stride(0),
        "sink_head_stride": query_sink.stride(1),
        "table": block_tables,
        "table_stride": block_tables.stride(0),
        "base": _base(arena, layer_offset),
        "block_stride": arena.stride(0),
        "k_scales_offset": layout.k_scales_offset,
        "v_codes_offset": layout.v_codes_offset,
        "v_scales_offset": layout.v_scales_offset,
        "exact_table": exact_tables,
        "exact_table_stride": exact_tables.stride(0),
        "exact_base": _base(exact_pool, exact_layer_offset),
        "exact_block_stride": exact_pool.stride(0),
        "exact_k_scales_offset": exact_layout.k_scales_offset,
        "exact_v_codes_offset": exact_layout.v_codes_offset,
        "exact_v_scales_offset": exact_layout.v_scales_offset,
        "scale": scale if softcap > 0 else scale * LOG2E,
        "softcap": softcap,
        "window": window,
        "num_sink_tokens": num_sink_tokens,
        "residual_length": residual_length,
        "num_exact_sinks": num_exact_sinks,
        "Q_BF16": query.dtype is torch.bfloat16,
        "GROUP_SIZE": group,
        "NUM_KV_HEADS": num_kv_heads,
        "FORMATS": _formats(layout, target, query.dtype),
        "EXACT_FORMATS": _formats(exact_layout, target, query.dtype),
        # The last: whether rounding the query to bf16 leaves a remainder, as it does once it is rotated.
        "DIMS": (k_dim, v_dim, _padded(k_dim), _padded(v_dim), *halves, k.rotate or query.dtype is not torch.bfloat16),
        "RULE": rule,
        "K_ROTATION": _rotation(k, k_dim),
        "BLOCK_SIZE": block_size,
    }
    logits = query if sink_logits is None else sink_logits.contiguous()
    ending = {
        "sink_logits": _bits(logits),
        "SINKS_BF16": logits.dtype is torch.bfloat16,
        "HAS_SINK_LOGITS": sink_logits is not None,
        "V_ROTATION": _rotation(v, v_dim),
    }
    every_row = num_rows <= num_seqs
    out = query.new_empty(num_rows, num_q_heads, v_dim)
    chosen = decode_parameters(layout, query.dtype, target)
    launches = _plan_decode(out, common, ending, block_tables.shape[1] * block_size, chosen, target, every_row)
    if not every_row:
        tuned = prefill_parameters(layout, query.dtype, group, target)
        tokens = tuned.rows // group
        turned, turns = _plan_turns(query, query_sink, k, target)
        launches += turns
        parts = query.new_empty(num_rows, num_q_heads, v_dim, dtype=torch.float32)
        sums = query.new_empty(num_rows, num_q_heads, 2, dtype=torch.float32)
        shared: dict[str, Any] = {"parts": parts, "sums": sums}
        arguments = (
            common
            | turned
            | shared
            | {
                "ROWS": tuned.rows,
                "TILE": tuned.tile,
                "EXACT_TILE": tuned.exact_tile,
                "STAGES": tuned.num_stages,
                "WIDEN": target.widen,
                "SKIP_SINGLE_ROWS": True,
            }
        )
        options = target.options(num_warps=tuned.num_warps, num_stages=tuned.num_stages)
        grid = num_rows // tokens + num_seqs, num_kv_heads
        del arguments["K_ROTATION"]
        launches.append(Launch(prefill, grid, arguments, options))
        shared |= {
            "num_parts": 1,
            "first_row": 0,
            "SPLIT": chosen.split,
            "EXTRA": 0,
            "EVERY_ROW": True,
            "OF_PREFILL": True,
        }
        launches.append(_plan_merge(out, common, ending | shared, num_rows, target))
    return out, launches


def _plan_turns(
    query: torch.Tensor, query_sink: torch.Tensor, k_format: KVFormat, target: Target
) -> tuple[dict[str, Any], list[Launch]]:
    """The arguments of `prefill` that are a query in the stored basis, and the launches that turn it."""
    if not k_format.rotate:
        return {}, []
    arguments: dict[str, Any] = {"Q_BF16": False}
    launches: list[Launch] = []
    num_rows, num_q_heads, dim = query.shape
    rows = max(1, 2048 // _padded(dim))
    for prefix, name, x in (("query", "query", query), ("sink", "query_sink", query_sink)):
        if prefix == "sink" and x is query:
            turned = arguments["query"]
        else:
            turned = x.new_empty(x.shape, dtype=torch.float32)
            own = {
                "query": _bits(x),
                "out": turned,
                "num_rows": num_rows,
                "query_stride": x.stride(0),
                "query_head_stride": x.stride(1),
                "Q_BF16": x.dtype is torch.bfloat16,
                "NUM_Q_HEADS": num_q_heads,
                "DIM": dim,
                "PADDED": _padded(dim),
                "ROTATION": _rotation(k_format, dim),
                "ROWS": rows,
            }
            grid = (-(-num_rows * num_q_heads // rows),)
            launches.append(Launch(turn_query, grid, own, target.options(num_warps=4, num_stages=1)))
        arguments |= {name: turned, f"{prefix}_stride": turned.stride(0), f"{prefix}_head_stride": turned.stride(1)}
    return arguments, launches


def _plan_decode(
    out: torch.Tensor,
    common: dict[str, Any],
    ending: dict[str, Any],
    max_keys: int,
    tuned: DecodeParameters,
    target: Target,
    every_row: bool,
) -> list[Launch]:
    """`decode` and `merge` for every packed row, or for the sequences of one row."""
    num_rows, num_q_heads, v_dim = out.shape
    has_window, has_sinks, _, has_residual, _ = common["RULE"]
    extra = int(has_sinks or has_residual)
    num_parts = -(-max_keys // tuned.split)
    if has_window:  # which begins and ends inside a split
        num_parts = min(num_parts, (common["window"] - 1) // tuned.split + 2)
    num_parts += extra
    programs = num_rows if every_row else common["num_seqs"]
    row_bytes = num_q_heads * num_parts * v_dim * 4
    together = max(1, min(programs, MAX_PARTS_BYTES // row_bytes)) if every_row else programs
    parts = out.new_empty((together, num_q_heads, num_parts, v_dim), dtype=torch.float32)
    sums = out.new_empty((together, num_q_heads, num_parts, 2), dtype=torch.float32)
    launches = []
    for first_row in range(0, programs, together):
        count = min(together, programs - first_row)
        shared = {
            "parts": parts,
            "sums": sums,
            "num_parts": num_parts,
            "first_row": first_row,
            "SPLIT": tuned.split,
            "EXTRA": extra,
            "EVERY_ROW": every_row,
        }
        arguments = (
            common
            | shared
            | {
                "ROWS": max(16, 1 << (common["GROUP_SIZE"] - 1).bit_length()),
                "TILE": tuned.tile,
                "EXACT_TILE": tuned.exact_tile,
                "STAGES": tuned.num_stages,
                "WIDEN": target.widen,
            }
        )
        options = target.options(tuned.num_warps, tuned.num_stages, max_registers=tuned.max_registers)
        launches.append(Launch(decode, (count, common["NUM_KV_HEADS"], num_parts), arguments, options))
        launches.append(_plan_merge(out, common, ending | shared | {"OF_PREFILL": False}, count, target))
    return launches


def _plan_merge(
    out: torch.Tensor, common: dict[str, Any], arguments: dict[str, Any], programs: int, target: Target
) -> Launch:
    _, num_q_heads, v_dim = out.shape
    arguments = arguments | {
        "out": _bits(out),
        "query_start_loc": common["query_start_loc"],
        "seq_lens": common["seq_lens"],
        "num_seqs": common["num_seqs"],
        "window": common["window"],
        "residual_length": common["residual_length"],
        "Q_BF16": common["Q_BF16"],
        "NUM_Q_HEADS": num_q_heads,
        "V_DIM": v_dim,
        "V_PADDED": _padded(v_dim),
        "HAS_WINDOW": common["RULE"][0],
    }
    return Launch(merge, (programs, num_q_heads), arguments, target.options(num_warps=4, num_stages=2))
