"""oneDNN's switch, which is the whole process's: off for products of a single row, left alone in deterministic mode.

A decode step of one sequence multiplies one row with every weight. For that row torch's own matrix-vector kernel reads
bfloat16 weights 1.6 to 2.4 times as fast as oneDNN does, with the same float32 sums (torch 2.13, two cores with
AVX-512, layers 576 and 2,048 wide). From three rows on it is several times slower.
"""

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_IS_X86 = platform.machine() in ("x86_64", "AMD64")
_onednn: Any = torch.backends.mkldnn


class _Use:
    """Steps that run now: those that have turned oneDNN off, and those that need it as it is."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.off = self.held = 0


_use = _Use()


def favours_single_row(module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `single_row_products` is faster for a model in ``dtype``, all of it.

    That is bfloat16 on x86 (float16 and float32 come out alike, other machines were not tried), with all weights in
    linear layers and embeddings: on gpt-oss's experts, which lie the other way round, it is 12 times slower.
    """
    if dtype is not torch.bfloat16 or device.type != "cpu" or not _IS_X86 or not _onednn.is_available():
        return False
    return all(
        isinstance(part, torch.nn.Linear | torch.nn.Embedding)
        for part in module.modules()
        for weight in part.parameters(recurse=False)
        if weight.dim() > 1
    )


@contextmanager
def single_row_products() -> Iterator[None]:
    """Products without oneDNN, where the process lets it be turned off and no deterministic step runs beside.

    Other threads' products are as right meanwhile; those of many bfloat16 rows take several times as long.
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
    """lean does not turn it meanwhile, which would change the bits of products. Waits for the steps that have."""
    with _use.changed:
        _use.changed.wait_for(lambda: not _use.off)
        _use.held += 1
    try:
        yield
    finally:
        with _use.changed:
            _use.held -= 1
