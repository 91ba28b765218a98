"""The two ops on CUDA and HIP devices, and, where Triton interprets its kernels, on a CPU."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from lean.kernels import reference
from lean.kernels.triton.launch import plan_kv_write, plan_paged_attention, unsupported
from lean.kernels.triton.parameters import Target
from lean.quant import KVFormat


@cache
def target_of(device: torch.device) -> Target:
    """What the kernels are compiled for on ``device``."""
    if device.type == "cpu":
        return Target("interpreter", 0)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0])
    return Target("cuda", 10 * properties.major + properties.minor)


def _on(device: torch.device) -> AbstractContextManager:
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


@cache
def _refused(*case: Any) -> bool:
    """Whether the torch reference must serve; says so once for every case."""
    reason = unsupported(*case)
    if reason:
        warnings.warn(f"{reason}: the torch reference serves these layers", stacklevel=2)
    return reason is not None


def kv_write(
    arena: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor, *rest: Any
) -> None:
    """See `lean.kernels.ops.kv_write`."""
    k_format, v_format = (KVFormat.from_code(code) for code in rest[2:4])
    if _refused(k_format, v_format, key.shape[2], value.shape[2], key.dtype):
        return reference.kv_write(arena, key, value, slot_mapping, *rest)
    with _on(arena.device):
        for launch in plan_kv_write(arena, key, value, slot_mapping, *rest, target=target_of(arena.device)):
            launch.run()


def paged_attention(query: torch.Tensor, *rest: Any) -> torch.Tensor:
    """See `lean.kernels.ops.paged_attention`."""
    v_dim, k_code, v_code = rest[12:15]
    k_format, v_format = KVFormat.from_code(k_code), KVFormat.from_code(v_code)
    if _refused(k_format, v_format, query.shape[2], v_dim, query.dtype):
        return reference.paged_attention(query, *rest)
    with _on(query.device):
        out, launches = plan_paged_attention(query, *rest, target=target_of(query.device))
        for launch in launches:
            launch.run()
    return out
