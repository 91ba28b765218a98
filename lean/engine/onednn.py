"""oneDNN's switch, one per process: off for products of a single row, untouched in deterministic mode.

A decode step of one sequence multiplies one row with every weight. For a single row torch's own matrix-vector kernel
reads bfloat16 weights 1.6 to 2.4 times as fast as oneDNN, with the same float32 sums (torch 2.13, two cores with
AVX-512, layers 576 and 2,048 wide). From three rows on it is several times slower.
"""

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lean.model.latent import LatentProjection

_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_onednn: Any = torch.backends.mkldnn


class _Use:
    """Numbers of running steps that have turned oneDNN off, and of those that need it unchanged."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.off = self.held = 0


_use = _Use()


def favours_single_row(module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `single_row_products` makes a whole model in ``dtype`` faster.

    True for bfloat16 on x86 with all weights in linear layers, embeddings and latent projections. With float16 and
    float32 the times are equal, and other machines were not measured. On gpt-oss's experts, whose weights are
    transposed, it is 12 times slower.
    """
    if dtype is not torch.bfloat16 or device.type != "cpu" or not _IS_X86 or not _onednn.is_available():
        return False
    return all(
        isinstance(part, torch.nn.Linear | torch.nn.Embedding | LatentProjection)
        for part in module.modules()
        for weight in part.parameters(recurse=False)
        if weight.dim() > 1
    )


@contextmanager
def single_row_products() -> Iterator[None]:
    """Products without oneDNN, unless its switch is frozen or a deterministic step runs at the same time.

    Products of other threads stay correct meanwhile; those of many bfloat16 rows take several times as long.
    """
    ours = False
    try:
        with _use.changed:
            is_ours_to_turn = (_onednn.enabled or _use.off) and not torch.backends.flags_frozen()
            if is_ours_to_turn and not _use.held:
                ours = True
                _use.off += 1
                _onednn.enabled = False
        yield
    finally:
        if ours:
            with _use.changed:
                if _use.off == 1:
                    _onednn.enabled = True
                _use.off -= 1
                _use.changed.notify_all()


@contextmanager
def onednn_as_it_is() -> Iterator[None]:
    """Keep oneDNN's switch unchanged, since it decides the bits of products. Waits for steps that turned it off."""
    with _use.changed:
        _use.changed.wait_for(lambda: not _use.off)
        _use.held += 1
    try:
        yield
    finally:
        with _use.changed:
            _use.held -= 1
