"""Numbers that cross between the host and the device in a step: sent without waiting, read together."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch


def send(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of the host's numbers. The host does not wait for the device: only pinned memory is copied so."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def read(tensors: Sequence[torch.Tensor]) -> list[numpy.ndarray]:
    """The values of some tensors as float64 arrays of their shapes. The host waits for the device once.

    float64 holds booleans, float32 and integers up to 2^53 exactly.
    """
    if not tensors:
        return []
    values = to_host(torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors]))
    found, start = [], 0
    for tensor in tensors:
        found.append(values[start : start + tensor.numel()].reshape(tensor.shape))
        start += tensor.numel()
    return found


def to_host(tensor: torch.Tensor) -> numpy.ndarray:
    """Waits until the device has computed the tensor."""
    return tensor.cpu().numpy()
