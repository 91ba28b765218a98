"""Short calls in one run: on a GPU a CUDA graph, so that a launch costs no time of the host."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from lean.engine.cuda_graphs import CudaGraphs
from lean.eval.bench.timing import Timing, seconds_of, take_turns

Call = Callable[[], Any]
_TURN_S = 2e-3  # a turn takes at least this long, so that waiting for the device at its end is a small part of it
_MOST_REPLAYS = 200


class Turn(NamedTuple):
    """``run`` makes ``calls`` calls."""

    run: Call
    calls: int


def as_one(calls: Sequence[Call], device: torch.device, record: bool = True) -> Turn:
    """All of ``calls`` in one turn. On a GPU they are recorded, and replayed as often as it takes to time them.

    record: False for calls that read on the host what the device has computed, as the torch reference does.
    """
    if device.type == "cpu" or not record:
        return Turn(partial(_each, calls), len(calls))
    replay = CudaGraphs(device)(partial(_each, calls))
    seconds_of(replay, device)
    replays = min(_MOST_REPLAYS, math.ceil(_TURN_S / seconds_of(replay, device)))
    return Turn(partial(_each, [replay] * replays), replays * len(calls))


def _each(calls: Sequence[Call]) -> Any:
    """Make the calls; returns the last one's result."""
    found = None
    for call in calls:
        found = call()
    return found


def time_calls(
    calls: Mapping[str, Sequence[Call]], device: torch.device, rounds: int, eager: Collection[str] = ()
) -> dict[str, Timing]:
    """Time of one call of each contender. They take turns, each turn with all calls of one; see `as_one`.

    eager: contenders that are not recorded.
    """
    turns = {name: as_one(steps, device, name not in eager) for name, steps in calls.items()}
    timings = take_turns({name: turn.run for name, turn in turns.items()}, rounds, device)
    return {name: replace(timing, median=timing.median / turns[name].calls) for name, timing in timings.items()}
