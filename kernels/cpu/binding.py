"""Calls the C++ kernels: tensors to one packed block of arguments (args.h), and what the torch reference keeps.

float64 queries, and pools in fp64, stay with the reference: they serve tests of accuracy, not speed.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lean.kernels import reference
from lean.kernels.cpu import build
from lean.kernels.layout import KVLayout
from lean.quant import BF16, FP8, FP16, FP32, INT4, INT8, KVFormat

ISAS = ("portable", "avx2", "avx512")  # as numbered in dispatch.cpp
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum Dtype in args.h
_CODES = {FP32.name: 0, FP16.name: 1, BF16.name: 2, INT8.name: 3, FP8.name: 4, INT4.name: 5}
_POOL = "8q"
_WRITE = struct.Struct(f"={_POOL} 2Q 4q Q 9q")
_ATTENTION = struct.Struct(f"={_POOL} {_POOL} 2Q 2q 2Q 4q 4Q 15q 2d")
_NO_POOL = (0,) * 8


class Library:
    """The loaded library and the instruction set it is called with."""

    def __init__(self, path: str, isa: str | None = None) -> None:
        """``isa``: one of ISAS that this CPU runs, by default the last one. Raises ValueError for another."""
        library = ctypes.CDLL(path)
        library.lean_has_isa.argtypes, library.lean_has_isa.restype = [ctypes.c_int64], ctypes.c_int64
        available = [name for number, name in enumerate(ISAS) if library.lean_has_isa(number)]
        if isa is not None and isa not in available:
            raise ValueError(f"LEAN_CPU_ISA={isa!r} cannot be served: this CPU and build have {', '.join(available)}")
        self.isa = isa or available[-1]
        number = ISAS.index(self.isa)

        def entry(name: str) -> Callable[[bytes], None]:
            function = getattr(library, name)
            function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_int64], None
            return lambda block: function(block, number)

        self.kv_write, self.paged_attention = entry("lean_kv_write"), entry("lean_paged_attention")


@cache
def _load(isa: str | None) -> Library | None:
    path = build.find_library()
    return None if path is None else Library(str(path), isa)


_serving: Library | None = None
_chosen = False


def choose() -> Library | None:
    """Read the environment and settle what serves from now on: the library, or None for the reference.

    ``LEAN_CPU_ISA`` names one of ISAS, by default it is the best; ``LEAN_KERNELS=reference`` turns the library off. The
    first call of an op does the same; later ones do not look again.
    """
    global _serving, _chosen
    _serving = None if reference.is_wanted() else _load(os.environ.get("LEAN_CPU_ISA") or None)
    _chosen = True
    return _serving


def describe() -> str:
    """What serves the CPU from now on: ``C++ avx512 (cpu)``, or the reference and what would help."""
    found = choose()
    if found is not None:
        return f"C++ {found.isa} (cpu)"
    if reference.is_wanted():
        return "torch reference (cpu), as LEAN_KERNELS asks"
    if sys.platform != "linux":
        return "torch reference (cpu), many times slower than the C++ kernels, which are for Linux"
    remedy = build.HOW if build.compiler() else "install g++, then " + build.HOW
    return f"torch reference (cpu), many times slower than the C++ kernels, which are not built: {remedy}"


@cache
def _offsets(
    k_code: int, v_code: int, num_kv_heads: int, k_dim: int, v_dim: int, block_size: int
) -> tuple[tuple[int, ...], tuple[int, int], tuple[bool, bool]]:
    """Byte offsets of a layer's four parts, its formats as args.h numbers them (-1: not there), their rotations."""
    formats = KVFormat.from_code(k_code), KVFormat.from_code(v_code)
    layout = KVLayout(*formats, num_kv_heads, k_dim, v_dim, block_size)
    parts = (0, layout.k_scales_offset, layout.v_codes_offset, layout.v_scales_offset)
    k_format, v_format = (_CODES.get(fmt.name, -1) for fmt in formats)
    return parts, (k_format, v_format), (formats[0].rotate, formats[1].rotate)


def _dense(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """``x`` [tokens, heads, dim] with neighbouring dims next to each other, and its strides."""
    strides = x.stride()
    if strides[2] == 1:
        return x, strides[:2]
    x = x.contiguous()
    return x, x.stride()[:2]


def _packed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers as C++ reads them; the tensor itself where it is so."""
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()


def kv_write(
    arena: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    layer_offset: int,
    block_size: int,
    k_format: int,
    v_format: int,
) -> None:
    """See `lean.kernels.ops.kv_write`, which checks the arguments."""
    num_tokens, num_kv_heads, k_dim = key.shape
    v_dim = value.shape[2]
    parts, formats, rotations = _offsets(k_format, v_format, num_kv_heads, k_dim, v_dim, block_size)
    dtype = _DTYPES.get(key.dtype, -1)
    serving = _serving if _chosen else choose()
    if serving is None or dtype < 0 or value.dtype != key.dtype or min(formats) < 0:
        return reference.kv_write(arena, key, value, slot_mapping, layer_offset, block_size, k_format, v_format)
    (key, key_strides), (value, value_strides) = _dense(key), _dense(value)
    slots = _packed(slot_mapping, torch.int64)
    serving.kv_write(
        _WRITE.pack(
            arena.data_ptr() + layer_offset, arena.stride(0), *parts, *formats,
            key.data_ptr(), value.data_ptr(), *key_strides, *value_strides, slots.data_ptr(),
            num_tokens, num_kv_heads, k_dim, v_dim, block_size, dtype, *rotations, torch.get_num_threads(),
        )
    )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    query_sink: torch.Tensor | None,
    arena: torch.Tensor,
    block_tables: torch.Tensor,
    exact_arena: torch.Tensor | None,
    exact_block_tables: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sink_logits: torch.Tensor | None,
    layer_offset: int,
    exact_layer_offset: int,
    block_size: int,
    num_kv_heads: int,
    v_dim: int,
    k_format: int,
    v_format: int,
    exact_k_format: int,
    exact_v_format: int,
    *rule: Any,
) -> torch.Tensor:
    """See `lean.kernels.ops.paged_attention`, which checks the arguments; ``rule`` are its numbers from scale on."""
    num_tokens, num_q_heads, k_dim = query.shape
    heads = num_kv_heads, k_dim, v_dim, block_size
    parts, formats, rotations = _offsets(k_format, v_format, *heads)
    exact_parts, exact_formats = parts, formats
    if exact_arena is not None:
        exact_parts, exact_formats, _ = _offsets(exact_k_format, exact_v_format, *heads)
    dtype = _DTYPES.get(query.dtype, -1)
    serving = _serving if _chosen else choose()
    if serving is None or dtype < 0 or min(*formats, *exact_formats) < 0:
        return reference.paged_attention(
            query, query_sink, arena, block_tables, exact_arena, exact_block_tables, query_start_loc, seq_lens,
            sink_logits, layer_offset, exact_layer_offset, block_size, num_kv_heads, v_dim, k_format, v_format,
            exact_k_format, exact_v_format, *rule,
        )  # fmt: skip
    (query, strides), tables = _dense(query), _packed(block_tables, torch.int32)
    exact_pool: tuple[int, ...] = _NO_POOL
    exact_tables = tables
    if exact_arena is not None and exact_block_tables is not None:
        exact_pool = (
            exact_arena.data_ptr() + exact_layer_offset, exact_arena.stride(0), *exact_parts, *exact_formats,
        )  # fmt: skip
        exact_tables = _packed(exact_block_tables, torch.int32)
    sink, sink_strides = (None, (0, 0)) if query_sink is None else _dense(query_sink.to(query.dtype))
    starts, lengths = _packed(query_start_loc, torch.int32), _packed(seq_lens, torch.int32)
    logits = None if sink_logits is None else sink_logits.to(torch.float32).contiguous()
    scale, softcap, *visible = rule
    out = torch.empty((num_tokens, num_q_heads, v_dim), dtype=query.dtype)
    serving.paged_attention(
        _ATTENTION.pack(
            arena.data_ptr() + layer_offset, arena.stride(0), *parts, *formats,
            *exact_pool, tables.data_ptr(), exact_tables.data_ptr(), tables.shape[1], exact_tables.shape[1],
            query.data_ptr(), 0 if sink is None else sink.data_ptr(), *strides, *sink_strides,
            out.data_ptr(), starts.data_ptr(), lengths.data_ptr(), 0 if logits is None else logits.data_ptr(),
            num_tokens, lengths.shape[0], num_q_heads, num_kv_heads, k_dim, v_dim, block_size, dtype, *rotations,
            *visible, torch.get_num_threads(), scale, softcap,
        )
    )  # fmt: skip
    return out
