"""Calls the C++ kernels: packs a call into one block of arguments (args.h).

float64 queries and fp64 pools go to the torch reference: they serve tests of accuracy, not speed.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from functools import cache

import torch

from lean.kernels import reference
from lean.kernels.call import AttentionCall, EncodeCall, WriteCall
from lean.kernels.cpu import build
from lean.quant import BF16, FP8, FP16, FP32, INT8, Kind, KVFormat

ISAS = ("portable", "avx2", "avx512")  # as numbered in dispatch.cpp
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum Dtype in args.h
_CODES = {FP32.name: 0, FP16.name: 1, BF16.name: 2, INT8.name: 3, FP8.name: 4}
_GRID = {3: 5, 4: 6, 5: 7, 6: 8}  # by bits
_CHANNEL = {3: 9, 4: 10, 5: 11}  # by bits


def _number_of(fmt: KVFormat) -> int:
    """The format as C++ knows it, -1: not at all."""
    if fmt.by_channel:
        return _CHANNEL[fmt.bits]
    return _GRID[fmt.bits] if fmt.kind is Kind.GRID else _CODES.get(fmt.name, -1)


_FORMATS = [_number_of(KVFormat.from_code(code)) for code in KVFormat.codes()]  # by `KVFormat.code`
_POOL = "10q"
_WRITE = struct.Struct(f"={_POOL} 2Q 4q Q 10q")
_ENCODE = struct.Struct("=2Q 2q 3q 2Q 5q")
_ATTENTION = struct.Struct(f"={_POOL} {_POOL} 2Q 2q 2Q 4q 4Q 16q 2d")
_NO_POOL = (0,) * 10


class Library:
    """The loaded library and the instruction set it is called with."""

    def __init__(self, path: str, isa: str | None = None) -> None:
        """``isa``: one of ISAS that this CPU runs, by default the last such one. Raises ValueError for another."""
        library = ctypes.CDLL(path)
        library.lean_has_isa.argtypes, library.lean_has_isa.restype = [ctypes.c_int64], ctypes.c_int64
        available = [name for number, name in enumerate(ISAS) if library.lean_has_isa(number)]
        if isa is not None and isa not in available:
            raise ValueError(f"LEAN_CPU_ISA={isa!r} cannot be served: this CPU and build have {', '.join(available)}")
        self.isa = isa or available[-1]
        self.isa_number = ISAS.index(self.isa)

        def entry(name: str) -> Callable[[bytes, int], None]:
            function = getattr(library, name)
            function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_int64], None
            return function

        # Each takes a block of arguments (args.h) and ``isa_number``.
        self.kv_write, self.encode_keys = entry("lean_kv_write"), entry("lean_encode_keys")
        self.paged_attention = entry("lean_paged_attention")


@cache
def _load(isa: str | None) -> Library | None:
    path = build.find_library()
    return None if path is None else Library(str(path), isa)


_serving: Library | None = None
_chosen = False


def choose() -> Library | None:
    """Read the environment and choose what serves from now on: the library, or None for the reference.

    ``LEAN_CPU_ISA`` names one of ISAS; the default is the best. ``LEAN_KERNELS=reference`` turns the library off. The
    first call of an op chooses too; later calls do not read the environment again.
    """
    global _serving, _chosen
    _serving = None if reference.is_wanted() else _load(os.environ.get("LEAN_CPU_ISA") or None)
    _chosen = True
    return _serving


def describe() -> str:
    """What serves the CPU from now on: ``C++ avx512 (cpu)``, or the reference and how to get the C++ kernels."""
    found = choose()
    if found is not None:
        return f"C++ {found.isa} (cpu)"
    if reference.is_wanted():
        return "torch reference (cpu), as LEAN_KERNELS asks"
    if sys.platform != "linux":
        return "torch reference (cpu), many times slower than the C++ kernels, which are for Linux"
    remedy = build.HOW if build.compiler() else "install g++, then " + build.HOW
    return f"torch reference (cpu), many times slower than the C++ kernels, which are not built: {remedy}"


def lacking(k_format: KVFormat, v_format: KVFormat, dtype: torch.dtype) -> str | None:
    """Why the C++ kernels cannot serve a layer with these formats and queries of ``dtype``, or None."""
    names = (str(dtype).removeprefix("torch."), k_format.name, v_format.name)
    known = (dtype in _DTYPES, _number_of(k_format) >= 0, _number_of(v_format) >= 0)
    return next((f"{name} has no C++ kernel" for name, found in zip(names, known) if not found), None)


def _dense(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """``x`` [tokens, heads, dim] with the elements of a vector next to each other, and its strides."""
    token, head, element = x.stride()
    if element != 1:
        x = x.contiguous()
        token, head, _ = x.stride()
    return x, (token, head)


def _packed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers as C++ reads them: of ``dtype`` and contiguous. The tensor itself where it is so already."""
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()


def kv_write(call: WriteCall) -> None:
    """See `lean.kernels.ops.kv_write`, which checks the arguments."""
    k_format, v_format = _FORMATS[call.k_format], _FORMATS[call.v_format]
    dtype = _DTYPES.get(call.key.dtype, -1)
    serving = _serving if _chosen else choose()
    if serving is None or dtype < 0 or call.value.dtype != call.key.dtype or k_format < 0 or v_format < 0:
        return reference.kv_write(call)
    layout = call.layout
    (key, key_strides), (value, value_strides) = _dense(call.key), _dense(call.value)
    slots = _packed(call.slot_mapping, torch.int64)
    serving.kv_write(
        _WRITE.pack(
            call.arena.data_ptr() + call.layer_offset, call.arena.stride()[0], *layout.offsets, k_format, v_format,
            *layout.groups, key.data_ptr(), value.data_ptr(), *key_strides, *value_strides, slots.data_ptr(),
            slots.shape[0], layout.num_kv_heads, layout.k_dim, layout.v_dim, layout.block_size, dtype,
            layout.k_rotation_size, layout.v_rotation_size, layout.v_in_k, torch.get_num_threads(),
        ),
        serving.isa_number,
    )  # fmt: skip


def encode_keys(call: EncodeCall) -> None:
    """See `lean.kernels.ops.encode_keys`, which checks the arguments."""
    k_format, exact_k_format = _FORMATS[call.k_format], _FORMATS[call.exact_k_format]
    serving = _serving if _chosen else choose()
    if serving is None or exact_k_format < 0:
        return reference.encode_keys(call)
    slots, exact_slots = (_packed(x, torch.int64) for x in (call.slot_mapping, call.exact_slot_mapping))
    serving.encode_keys(
        _ENCODE.pack(
            call.arena.data_ptr() + call.layer_offset, call.exact_arena.data_ptr() + call.exact_layer_offset,
            call.arena.stride()[0], call.exact_arena.stride()[0], call.layout.k_scales_offset, k_format,
            exact_k_format, slots.data_ptr(), exact_slots.data_ptr(), slots.shape[0], call.num_kv_heads, call.k_dim,
            call.block_size, torch.get_num_threads(),
        ),
        serving.isa_number,
    )  # fmt: skip


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """See `lean.kernels.ops.paged_attention`, which checks the arguments."""
    k_format, v_format = _FORMATS[call.k_format], _FORMATS[call.v_format]
    exact_k_format, exact_v_format = _FORMATS[call.exact_k_format], _FORMATS[call.exact_v_format]
    dtype = _DTYPES.get(call.query.dtype, -1)
    serving = _serving if _chosen else choose()
    has_format = k_format >= 0 and v_format >= 0 and exact_k_format >= 0 and exact_v_format >= 0
    if serving is None or dtype < 0 or not has_format:
        return reference.paged_attention(call)
    num_tokens, num_q_heads, _ = call.query.shape
    layout = call.layout
    (query, strides), tables = _dense(call.query), _packed(call.block_tables, torch.int32)
    exact_pool: tuple[int, ...] = _NO_POOL
    exact_tables = tables
    if call.exact_arena is not None and call.exact_block_tables is not None:
        exact_pool = (
            call.exact_arena.data_ptr() + call.exact_layer_offset, call.exact_arena.stride()[0],
            *call.exact_layout.offsets, exact_k_format, exact_v_format, *call.exact_layout.groups,
        )  # fmt: skip
        exact_tables = _packed(call.exact_block_tables, torch.int32)
    sink, sink_strides = (None, (0, 0)) if call.query_sink is None else _dense(call.query_sink.to(query.dtype))
    starts, lengths = _packed(call.query_start_loc, torch.int32), _packed(call.seq_lens, torch.int32)
    logits = None if call.sink_logits is None else call.sink_logits.to(torch.float32).contiguous()
    out = query.new_empty(num_tokens, num_q_heads, layout.v_dim)
    serving.paged_attention(
        _ATTENTION.pack(
            call.arena.data_ptr() + call.layer_offset, call.arena.stride()[0], *layout.offsets, k_format, v_format,
            *layout.groups, *exact_pool,
            tables.data_ptr(), exact_tables.data_ptr(), tables.shape[1], exact_tables.shape[1],
            query.data_ptr(), 0 if sink is None else sink.data_ptr(), *strides, *sink_strides,
            out.data_ptr(), starts.data_ptr(), lengths.data_ptr(), 0 if logits is None else logits.data_ptr(),
            num_tokens, lengths.shape[0], num_q_heads, layout.num_kv_heads, layout.k_dim, layout.v_dim,
            layout.block_size, dtype, layout.k_rotation_size, layout.v_rotation_size, layout.v_stored_dim,
            call.window, call.num_sink_tokens, call.residual_length, call.num_exact_sinks,
            torch.get_num_threads(), call.scale, call.softcap,
        ),
        serving.isa_number,
    )  # fmt: skip
    return out
