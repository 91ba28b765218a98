"""From a `WriteCall` to the launch of `kv_write`."""

import torch

from lean.kernels.call import WriteCall
from lean.kernels.triton.common import FORMAT_CODES
from lean.kernels.triton.kv_write import kv_write
from lean.kernels.triton.launch import (
    Launch,
    base_of,
    bits_of,
    contiguous_dims,
    padded,
    rotation_of,
    vectors_per_program,
)
from lean.kernels.triton.parameters import Target


def plan_kv_write(call: WriteCall, target: Target) -> list[Launch]:
    """The launches that write K and V; none where there is no token."""
    layout = call.layout
    k, v, k_dim, v_dim = layout.k_format, layout.v_format, layout.k_dim, layout.v_dim
    num_vectors = call.key.shape[0] * layout.num_kv_heads
    if not num_vectors:
        return []
    key, value = contiguous_dims(call.key), contiguous_dims(call.value)
    rows = vectors_per_program(max(k_dim, v_dim))
    arguments = {
        "base": base_of(call.arena, call.layer_offset),
        "key": bits_of(key),
        "value": bits_of(value),
        "slot_mapping": call.slot_mapping,
        "num_vectors": num_vectors,
        "key_stride": key.stride(0),
        "key_head_stride": key.stride(1),
        "value_stride": value.stride(0),
        "value_head_stride": value.stride(1),
        "block_stride": call.arena.stride(0),
        "k_scales_offset": layout.k_scales_offset,
        "v_codes_offset": layout.v_codes_offset,
        "v_scales_offset": layout.v_scales_offset,
        "X_BF16": key.dtype is torch.bfloat16,
        "NUM_KV_HEADS": layout.num_kv_heads,
        "K_FORMAT": FORMAT_CODES[k.name],
        "V_FORMAT": FORMAT_CODES[v.name],
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "K_PADDED": padded(k_dim),
        "V_PADDED": padded(v_dim),
        "K_BYTES": k.code_bytes(k_dim),
        "V_BYTES": v.code_bytes(v_dim),
        "K_SCALE_BYTES": layout.k_stored.scale_bytes(k_dim),
        "V_SCALE_BYTES": v.scale_bytes(v_dim),
        "K_ROTATION": rotation_of(k, k_dim),
        "V_ROTATION": rotation_of(v, v_dim),
        "BLOCK_SIZE": layout.block_size,
        "ROWS": rows,
        "K_GROUP": layout.groups[0],
        "V_GROUP": layout.groups[1],
    }
    options = target.options(num_warps=4, num_stages=1, fuse=False)
    num_kinds = 1 if layout.v_in_k else 2
    return [Launch(kv_write, (-(-num_vectors // rows), num_kinds), arguments, options)]
