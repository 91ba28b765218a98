"""The two ops on CUDA and HIP devices, and, where Triton interprets its kernels, on a CPU."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from lean.kernels import reference
from lean.kernels.call import AttentionCall, WriteCall
from lean.kernels.triton.launch import unsupported
from lean.kernels.triton.parameters import Target
from lean.kernels.triton.plan_attention import plan_paged_attention
from lean.kernels.triton.plan_kv_write import plan_kv_write


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
    """Whether the torch reference must serve. It warns once for every case."""
    reason = unsupported(*case)
    if reason:
        warnings.warn(f"{reason}: the torch reference serves these layers", stacklevel=2)
    return reason is not None


def kv_write(call: WriteCall) -> None:
    """See `lean.kernels.ops.kv_write`."""
    layout = call.layout
    if _refused(layout.k_format, layout.v_format, layout.k_dim, layout.v_dim, call.key.dtype):
        return reference.kv_write(call)
    with _on(call.arena.device):
        for launch in plan_kv_write(call, target_of(call.arena.device)):
            launch.run()


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """See `lean.kernels.ops.paged_attention`."""
    layout, device = call.layout, call.query.device
    if _refused(layout.k_format, layout.v_format, layout.k_dim, layout.v_dim, call.query.dtype):
        return reference.paged_attention(call)
    with _on(device):
        out, launches = plan_paged_attention(call, target_of(device))
        for launch in launches:
            launch.run()
    return out
