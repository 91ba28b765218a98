"""Whether this CPU multiplies packed weights more slowly than bfloat16 ones."""

import time
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch

from lean.quant.packed import Int4Linear, Int8Linear, pack_int4, pack_int8, row_parts

_ELEMENTS = 1 << 20  # of the weights that are multiplied for the trial
_REPEATS = 7
MARGIN = 1.5  # times as long, or the packed weights are taken: they take less memory, and busy machines vary


@cache
def is_slow(kind: Literal["int4", "int8"], outputs: int, inputs: int) -> bool:
    """Whether one row takes MARGIN times as long with packed weights of this shape as with bfloat16; a few ms."""
    outputs = max(16, min(outputs, _ELEMENTS // inputs) // 16 * 16)
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(0)
        weight = torch.randn(outputs, inputs)
        x = torch.randn(1, inputs).bfloat16()
        exact = weight.bfloat16()
        packed: Callable[[torch.Tensor], torch.Tensor]
        if kind == "int4":
            part = weight.new_ones(outputs, inputs // 32)
            codes = torch.zeros(outputs, inputs, dtype=torch.uint8)
            packed = Int4Linear(*pack_int4([(codes, part, part)], outputs, inputs, 32), outputs, None, True)
        else:
            packed = Int8Linear(*pack_int8(row_parts(weight), outputs, inputs)[:2], None, True)
        ours, theirs = least_seconds(lambda: packed(x), lambda: torch.nn.functional.linear(x, exact))
    return ours > MARGIN * theirs


def least_seconds(*calls: Callable[[], object]) -> list[float]:
    """The least time of each of some calls, which take turns."""
    least = [float("inf")] * len(calls)
    for turn in range(_REPEATS + 1):
        for index, call in enumerate(calls):
            started = time.perf_counter()
            call()
            if turn:  # the first one prepares
                least[index] = min(least[index], time.perf_counter() - started)
    return least
