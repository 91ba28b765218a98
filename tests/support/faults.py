"""Faults put into a model or into its cache."""

import math

import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint

from lean.kernels import ops
from lean.kernels.parts import parts_of


def sabotage(monkeypatch, factor, layers=None, keys_only=False):
    """Scales that ``kv_write`` leaves in the cache, times ``factor``, in the layers at these indices of the pool."""
    write = ops.kv_write

    def broken(pool, key, value, slot_mapping):
        write(pool, key, value, slot_mapping)
        if not pool.layout.k_format.quantized and not pool.layout.v_format.quantized:
            return
        if layers is not None and pool.offset // pool.layout.nbytes not in layers:
            return
        parts = parts_of(pool.arena, pool.layout, pool.offset)
        block, slot = slot_mapping // pool.layout.block_size, slot_mapping % pool.layout.block_size
        for scales in parts[1:2] if keys_only else parts[1::2]:
            if scales.dtype is torch.uint8:  # e5m3: eight steps double it
                scales[block, :, slot] += max(1, round(8 * math.log2(factor))) * (scales[block, :, slot] > 0)
            else:
                scales[block, :, slot] *= factor

    monkeypatch.setattr(ops, "kv_write", broken)


def outlier_keys(folder, layer=0, factor=500.0):
    """Two key channels of one layer get enormous biases of opposite signs, as Qwen2's first and last layers have."""
    file = tiny_checkpoint(folder, "qwen2") / "model.safetensors"
    weights = load_file(file)
    bias = weights[f"model.layers.{layer}.self_attn.k_proj.bias"]
    bias[3] *= factor
    bias[11] *= -factor
    save_file(weights, file, metadata={"format": "pt"})
    return folder
