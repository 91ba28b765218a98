"""The two ops on CUDA and HIP devices, and, where Triton interprets its kernels, on a CPU.

`lean.kernels.serving` knows which layers they can serve.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from lean.device import architecture
from lean.kernels.call import AttentionCall, WriteCall
from lean.kernels.triton.parameters import Target
from lean.kernels.triton.plan_attention import plan_paged_attention
from lean.kernels.triton.plan_kv_write import plan_kv_write


@cache
def target_of(device: torch.device) -> Target:
    """What the kernels are compiled for on ``device``."""
    if device.type == "cpu":
        return Target("interpreter", 0)
    return Target.named(architecture(device))


def _on(device: torch.device) -> AbstractContextManager:
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def kv_write(call: WriteCall) -> None:
    """See `lean.kernels.ops.kv_write`."""
    with _on(call.arena.device):
        for launch in plan_kv_write(call, target_of(call.arena.device)):
            launch.run()


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """See `lean.kernels.ops.paged_attention`."""
    device = call.query.device
    with _on(device):
        out, launches = plan_paged_attention(call, target_of(device))
        for launch in launches:
            launch.run()
    return out
