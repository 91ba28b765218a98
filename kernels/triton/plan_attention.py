"""From an `AttentionCall` to launches: which kernel, which grid, which arguments. Nothing here asks the device."""

from functools import cache
from typing import Any, NamedTuple

import torch

from lean.kernels.call import AttentionCall, layout_of
from lean.kernels.layout import KVLayout
from lean.kernels.triton.common import FORMAT_CODES
from lean.kernels.triton.decode import decode, merge
from lean.kernels.triton.launch import (
    NO_ROTATION,
    Launch,
    base_of,
    bits_of,
    contiguous_dims,
    padded,
    rotation_of,
    vectors_per_program,
)
from lean.kernels.triton.parameters import (
    DecodeParameters,
    Target,
    decode_parameters,
    latent_head_parts,
    prefill_parameters,
)
from lean.kernels.triton.prefill import prefill, turn_query
from lean.quant import KVFormat

LOG2E = 1.4426950408889634
# Parts of at most this many bytes are held at once; more rows take several launches. A multiple of what any decode step
# needs, it bounds only prefills that go through the decode kernel.
MAX_PARTS_BYTES = 256 << 20


class Rule(NamedTuple):
    """RULE of the kernels, which read it by index: which parts of the visibility rule there are."""

    has_window: bool
    has_sinks: bool
    sinks_in_main: bool  # some sinks are read from the quantized pool
    has_residual: bool
    has_softcap: bool

    @classmethod
    def of(cls, call: AttentionCall) -> "Rule":
        has_sinks, has_residual = call.num_sink_tokens > 0, call.residual_length > 0
        in_main = has_sinks and (not has_residual or call.num_exact_sinks < call.num_sink_tokens)
        return cls(call.window > 0, has_sinks, in_main, has_residual, call.softcap > 0)


class Dims(NamedTuple):
    """DIMS of the kernels, which read it by index: sizes of the vectors, and in how many tiles they are held."""

    k: int
    v: int
    k_padded: int
    v_padded: int
    k_halves: int  # 2 for int4, see `common.dim_of`
    v_halves: int
    query_has_remainder: bool  # rounding the query to bf16 leaves a remainder, as it does once it is rotated
    rest: int  # where V lies in K: the numbers of K behind V
    rest_padded: int
    head_parts: int  # where V lies in K: the parts into which the query heads of a KV head are cut; else 0

    @classmethod
    def of(cls, layout: KVLayout, query_dtype: torch.dtype, head_parts: int) -> "Dims":
        k_dim, v_dim = layout.k_dim, layout.v_dim
        halves = [2 if fmt.bits == 4 else 1 for fmt in (layout.k_format, layout.v_format)]
        remainder = layout.k_format.rotate or query_dtype is not torch.bfloat16
        own = k_dim, v_dim, padded(k_dim), padded(v_dim), halves[0], halves[1], remainder
        rest = k_dim - v_dim if layout.v_in_k else 0
        return cls(*own, rest, padded(rest), head_parts)


class Formats(NamedTuple):
    """FORMATS of the kernels, which read it by index: `common.FORMAT_CODES` of the two formats and of the dtypes of
    their products, the bytes of a vector's codes and scales, and the dims that share a scale."""

    k: int
    v: int
    k_compute: int
    v_compute: int
    k_bytes: int
    v_bytes: int
    k_scale_bytes: int
    v_scale_bytes: int
    k_group: int
    v_group: int

    @classmethod
    def of(cls, layout: KVLayout, target: Target, query_dtype: torch.dtype) -> "Formats":
        k, v = layout.k_format, layout.v_format

        def compute(fmt: KVFormat) -> int:
            name = fmt.name if not fmt.quantized else "fp16"
            if query_dtype is torch.float32 or name == "fp32" or (name == "bf16" and not target.has_bf16):
                name = "fp32"
            return FORMAT_CODES[name]

        return cls(
            k=FORMAT_CODES[k.name],
            v=FORMAT_CODES[v.name],
            k_compute=compute(k),
            v_compute=compute(v),
            k_bytes=k.code_bytes(layout.k_dim),
            v_bytes=v.code_bytes(layout.v_dim),
            k_scale_bytes=layout.k_stored.scale_bytes(layout.k_dim),
            v_scale_bytes=v.scale_bytes(layout.v_dim),
            k_group=layout.groups[0],
            v_group=layout.groups[1],
        )


class _Step(NamedTuple):
    """What all launches of one call share.

    query, query_sink: neighbouring elements next to each other; the same tensor where the sinks have no own query.
    out: [num_rows, num_q_heads, v_dim]. arguments: those that `decode` and `prefill` both take.
    """

    call: AttentionCall
    target: Target
    layout: KVLayout
    rule: Rule
    query: torch.Tensor
    query_sink: torch.Tensor
    out: torch.Tensor
    arguments: dict[str, Any]

    @property
    def num_rows(self) -> int:
        return self.query.shape[0]

    @property
    def num_q_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_seqs(self) -> int:
        return self.call.seq_lens.shape[0]

    @property
    def group(self) -> int:
        """Query heads of a program: those of a KV head, or of a part of it."""
        return self.num_q_heads // self.num_parts_of_heads

    @property
    def num_parts_of_heads(self) -> int:
        return self.layout.num_kv_heads * max(1, self.arguments["DIMS"].head_parts)


def plan_paged_attention(call: AttentionCall, target: Target) -> tuple[torch.Tensor, list[Launch]]:
    """The output, and the launches that fill it.

    Sequences of one row go through `decode`, the others through `prefill`; where there can be no others, every row is
    a program of `decode`, rows of no sequence included.
    """
    num_rows, num_q_heads, _ = call.query.shape
    if not num_rows or not call.seq_lens.shape[0]:
        return call.query.new_zeros(num_rows, num_q_heads, call.v_dim), []
    query = contiguous_dims(call.query)
    query_sink = query if call.query_sink is None else contiguous_dims(call.query_sink)
    layout, rule = call.layout, Rule.of(call)
    out = query.new_empty(num_rows, num_q_heads, call.v_dim)
    arguments = _query_arguments(call, query, query_sink) | _pool_arguments(call) | _rule_arguments(call, rule)
    codes = call.k_format, call.v_format
    exact_codes = codes if call.exact_arena is None else (call.exact_k_format, call.exact_v_format)
    sizes = call.num_kv_heads, layout.k_dim, layout.v_dim, call.block_size, call.v_in_k
    head_parts = latent_head_parts(num_q_heads // call.num_kv_heads) if call.v_in_k else 0
    arguments |= _format_arguments(codes, exact_codes, sizes, target, query.dtype, head_parts)
    step = _Step(call, target, layout, rule, query, query_sink, out, arguments)
    arguments |= {"GROUP_SIZE": step.group, "NUM_KV_HEADS": step.num_parts_of_heads}
    tuned = decode_parameters(layout, query.dtype, target)
    every_row = num_rows <= step.num_seqs
    turned, turns = _plan_turns(step) if call.v_in_k or not every_row else ({}, [])
    if call.v_in_k:  # `decode` has no registers left to turn such long queries itself
        own = step._replace(arguments=arguments | turned | {"K_ROTATION": NO_ROTATION})
        launches = turns + _plan_decode(own, tuned, every_row)
    else:
        launches = _plan_decode(step, tuned, every_row) + turns
    if not every_row:
        launches += _plan_prefill(step, turned, tuned.split)
    return out, launches


def _query_arguments(call: AttentionCall, query: torch.Tensor, query_sink: torch.Tensor) -> dict[str, Any]:
    return {
        "query": bits_of(query),
        "query_sink": bits_of(query_sink),
        "query_start_loc": call.query_start_loc,
        "seq_lens": call.seq_lens,
        "num_seqs": call.seq_lens.shape[0],
        "query_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "sink_stride": query_sink.stride(0),
        "sink_head_stride": query_sink.stride(1),
        "Q_BF16": query.dtype is torch.bfloat16,
    }


def _pool_arguments(call: AttentionCall) -> dict[str, Any]:
    """Both pools; without an exact pool the kernels get the quantized one twice and read it once."""
    exact_table = call.block_tables if call.exact_block_tables is None else call.exact_block_tables
    exact_arena = call.arena if call.exact_arena is None else call.exact_arena
    return {
        "table": call.block_tables,
        "table_stride": call.block_tables.stride(0),
        "base": base_of(call.arena, call.layer_offset),
        "block_stride": call.arena.stride(0),
        "exact_table": exact_table,
        "exact_table_stride": exact_table.stride(0),
        "exact_base": base_of(exact_arena, call.exact_layer_offset),
        "exact_block_stride": exact_arena.stride(0),
    }


@cache
def _format_arguments(
    codes: tuple[int, int],
    exact_codes: tuple[int, int],
    sizes: tuple[int, int, int, int, bool],
    target: Target,
    query_dtype: torch.dtype,
    head_parts: int,
) -> dict[str, Any]:
    """The arguments that follow from formats and sizes; read only, since all calls with these share them.

    codes, exact_codes: K's and V's format of the two pools. sizes: KV heads, k_dim, v_dim, block size, whether V lies
    in K. head_parts: of `Dims`.
    """
    layout, exact_layout = layout_of(*codes, *sizes), layout_of(*exact_codes, *sizes)
    return {
        "k_scales_offset": layout.k_scales_offset,
        "v_codes_offset": layout.v_codes_offset,
        "v_scales_offset": layout.v_scales_offset,
        "exact_k_scales_offset": exact_layout.k_scales_offset,
        "exact_v_codes_offset": exact_layout.v_codes_offset,
        "exact_v_scales_offset": exact_layout.v_scales_offset,
        "FORMATS": Formats.of(layout, target, query_dtype),
        "EXACT_FORMATS": Formats.of(exact_layout, target, query_dtype),
        "DIMS": Dims.of(layout, query_dtype, head_parts),
        "K_ROTATION": rotation_of(layout.k_format, layout.k_dim),
        "BLOCK_SIZE": layout.block_size,
    }


def _rule_arguments(call: AttentionCall, rule: Rule) -> dict[str, Any]:
    return {
        "scale": call.scale if rule.has_softcap else call.scale * LOG2E,
        "softcap": call.softcap,
        "window": call.window,
        "num_sink_tokens": call.num_sink_tokens,
        "residual_length": call.residual_length,
        "num_exact_sinks": call.num_exact_sinks,
        "RULE": rule,
    }


def _plan_decode(step: _Step, tuned: DecodeParameters, every_row: bool) -> list[Launch]:
    """`decode` and `merge` for every packed row, or for the sequences of one row."""
    call, rule, target = step.call, step.rule, step.target
    extra = int(rule.has_sinks or rule.has_residual)  # a part for the sinks and the exact pool
    max_keys = call.block_tables.shape[1] * call.block_size
    num_parts = -(-max_keys // tuned.split)
    if rule.has_window:  # it begins and ends inside a split
        num_parts = min(num_parts, (call.window - 1) // tuned.split + 2)
    num_parts += extra
    programs = step.num_rows if every_row else step.num_seqs
    row_bytes = step.num_q_heads * num_parts * call.v_dim * 4
    together = max(1, min(programs, MAX_PARTS_BYTES // row_bytes)) if every_row else programs
    shape = together, step.num_q_heads, num_parts
    parts = step.out.new_empty((*shape, call.v_dim), dtype=torch.float32)
    sums = step.out.new_empty((*shape, 2), dtype=torch.float32)
    constants = {
        "ROWS": max(16, 1 << (step.group - 1).bit_length()),
        "TILE": tuned.tile,
        "EXACT_TILE": tuned.exact_tile,
        "STAGES": tuned.num_stages,
        "WIDEN": target.widen,
    }
    options = target.options(tuned.num_warps, tuned.num_stages, max_registers=tuned.max_registers)
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
        grid = count, step.num_parts_of_heads, num_parts
        launches.append(Launch(decode, grid, step.arguments | shared | constants, options))
        launches.append(_plan_merge(step, shared | {"OF_PREFILL": False}, count))
    return launches


def _plan_prefill(step: _Step, turned: dict[str, Any], split: int) -> list[Launch]:
    """`prefill` and `merge` for the sequences of several rows. ``turned``: from `_plan_turns`."""
    target, group = step.target, step.group
    tuned = prefill_parameters(step.layout, step.query.dtype, group, target)
    shape = step.num_rows, step.num_q_heads
    shared: dict[str, Any] = {
        "parts": step.query.new_empty(*shape, step.call.v_dim, dtype=torch.float32),
        "sums": step.query.new_empty(*shape, 2, dtype=torch.float32),
    }
    constants = {
        "ROWS": tuned.rows,
        "TILE": tuned.tile,
        "EXACT_TILE": tuned.exact_tile,
        "STAGES": tuned.num_stages,
        "WIDEN": target.widen_in_prefill(tuned.rows),
        "SKIP_SINGLE_ROWS": True,
    }
    arguments = step.arguments | turned | shared | constants
    del arguments["K_ROTATION"]  # the query is rotated already
    options = target.options(tuned.num_warps, tuned.num_stages, max_registers=tuned.max_registers)
    grid = step.num_rows // (tuned.rows // group) + step.num_seqs, step.num_parts_of_heads
    one_part = {"num_parts": 1, "first_row": 0, "SPLIT": split, "EXTRA": 0, "EVERY_ROW": True, "OF_PREFILL": True}
    merging = _plan_merge(step, shared | one_part, step.num_rows)
    return [Launch(prefill, grid, arguments, options), merging]


def _plan_turns(step: _Step) -> tuple[dict[str, Any], list[Launch]]:
    """The arguments of `decode` and `prefill` that are a query in the stored basis, and the launches that rotate it."""
    k_format = step.layout.k_format
    if not k_format.rotate:
        return {}, []
    arguments: dict[str, Any] = {"Q_BF16": False}
    launches: list[Launch] = []
    num_rows, num_q_heads, dim = step.query.shape
    rows = vectors_per_program(dim)
    for prefix, name, x in (("query", "query", step.query), ("sink", "query_sink", step.query_sink)):
        if prefix == "sink" and x is step.query:
            rotated = arguments["query"]
        else:
            rotated = x.new_empty(x.shape, dtype=torch.float32)
            own = {
                "query": bits_of(x),
                "out": rotated,
                "num_rows": num_rows,
                "query_stride": x.stride(0),
                "query_head_stride": x.stride(1),
                "Q_BF16": x.dtype is torch.bfloat16,
                "NUM_Q_HEADS": num_q_heads,
                "DIM": dim,
                "PADDED": padded(dim),
                "ROTATION": rotation_of(k_format, dim),
                "ROWS": rows,
            }
            grid = (-(-num_rows * num_q_heads // rows),)
            launches.append(Launch(turn_query, grid, own, step.target.options(num_warps=4, num_stages=1)))
        arguments |= {name: rotated, f"{prefix}_stride": rotated.stride(0), f"{prefix}_head_stride": rotated.stride(1)}
    return arguments, launches


def _plan_merge(step: _Step, parts: dict[str, Any], programs: int) -> Launch:
    """The launch that adds up ``parts``, arguments of `merge`, for ``programs`` rows or sequences."""
    call, layout = step.call, step.layout
    logits = step.query if call.sink_logits is None else call.sink_logits.contiguous()
    arguments = parts | {
        "out": bits_of(step.out),
        "query_start_loc": call.query_start_loc,
        "seq_lens": call.seq_lens,
        "num_seqs": step.num_seqs,
        "window": call.window,
        "residual_length": call.residual_length,
        "sink_logits": bits_of(logits),
        "SINKS_BF16": logits.dtype is torch.bfloat16,
        "HAS_SINK_LOGITS": call.sink_logits is not None,
        "Q_BF16": step.query.dtype is torch.bfloat16,
        "NUM_Q_HEADS": step.num_q_heads,
        "V_DIM": layout.v_dim,
        "V_PADDED": padded(layout.v_dim),
        "V_ROTATION": rotation_of(layout.v_format, layout.v_stored_dim),
        "HAS_WINDOW": step.rule.has_window,
    }
    return Launch(merge, (programs, step.num_q_heads), arguments, step.target.options(num_warps=4, num_stages=2))
