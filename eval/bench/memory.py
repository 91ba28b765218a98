"""Memory as benchmarks meet it: its bandwidth, and how much of it a measurement may take."""

import time
from functools import partial

import torch

from lean.device import free_bytes
from lean.eval.bench.timing import seconds_of

COLD_BYTES = 256 * 2**20  # bytes read between two reads of the same byte: more than any cache holds
_GPU_BUFFER = 2**30  # bytes of a buffer whose reading hides what a launch costs
_CLOCKS_S = 0.5  # seconds of work after which a GPU's clocks are up


def buffer_bytes(device: torch.device, count: int) -> int:
    """Size of each of ``count`` buffers for bandwidths: on a GPU 1 GiB, together at most half of what is free."""
    if device.type == "cpu":
        return COLD_BYTES
    return max(2**20, min(_GPU_BUFFER, free_bytes(device) // (2 * count)))


def read_bandwidth(device: torch.device) -> float | None:
    """Bytes per second that a sum over a buffer larger than the caches reads; the best of 7.

    None where there is no memory for a buffer of COLD_BYTES: caches may hold a smaller one.
    """
    nbytes = buffer_bytes(device, 1)
    if nbytes < COLD_BYTES:
        return None
    words = torch.ones(nbytes // 4, device=device)
    words.sum()
    return words.nbytes / min(seconds_of(words.sum, device) for _ in range(7))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written together, of a copy between two buffers larger than the caches; best of 10."""
    source = torch.ones(buffer_bytes(device, 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    if device.type != "cpu":
        end = time.perf_counter() + _CLOCKS_S
        while time.perf_counter() < end:
            seconds_of(copy, device)
    return 2 * source.nbytes / min(seconds_of(copy, device) for _ in range(10))
