"""``lean bench profile``: the time of a decode step by part."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from lean.engine import engine as engine_module
from lean.eval.bench.model import bench_tokens
from lean.eval.bench.peers import Lean
from lean.eval.bench.timing import seconds_of, synchronize
from lean.llm import LLM
from lean.model import attention

STEPS = 24
STEPS_IN_ALL = 2 * STEPS + 8
PARTS = (
    "attention",
    "linears",
    "head",
    "norms and rope",
    "rest of the model",
    "sampling",
    "scheduler",
    "rest of the step",
)


class _Clock:
    """Time spent in each part of a step. Time in a nested part counts for the nested part only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[float] = []

    def __call__(self, part: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._open.append(0.0)
        synchronize(self._device)
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            synchronize(self._device)
            taken = time.perf_counter() - start
            self.seconds[part] += taken - self._open.pop()
            if self._open:
                self._open[-1] += taken

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(part, call, *args, **kwargs)


def _part_of(module: torch.nn.Module) -> str | None:
    name = type(module).__name__
    if "Linear" in name:
        return "linears"
    return "norms and rope" if "Norm" in name or "Rotary" in name else None


@contextmanager
def _watched(llm: LLM, clock: _Clock) -> Iterator[None]:
    """Every part of a step of this engine is timed by the clock."""
    with ExitStack() as stack:

        def put(target: object, name: str, part: str) -> None:
            stack.enter_context(mock.patch.object(target, name, clock.around(part, getattr(target, name))))

        model: Any = llm.model.module
        head = model.get_output_embeddings()
        for module in model.modules():
            if module is not head and (part := _part_of(module)) is not None:
                put(module, "forward", part)
        put(attention, "attend", "attention")
        put(llm.engine.runner, "logits", "head")
        put(llm.engine.runner, "run", "rest of the model")
        put(llm.engine.runner, "batch", "scheduler")
        for name in ("schedule", "advance", "fork"):
            put(llm.engine.scheduler, name, "scheduler")
        put(engine_module, "next_output", "sampling")
        yield


def profile(llm: LLM, context: int) -> dict[str, float]:
    """Milliseconds per step by part, of one sequence after ``context`` tokens; ``whole``: the step without clocks."""
    engine, device = Lean(llm.model, llm.config), llm.model.device
    engine.read(bench_tokens(llm, context))
    for _ in range(3):
        engine.step()

    def steps() -> float:
        taken = []
        for _ in range(STEPS):
            taken.append(seconds_of(engine.step, device))
        return sorted(taken)[STEPS // 2]

    whole, clock = steps(), _Clock(device)
    with _watched(engine.llm, clock):
        for _ in range(STEPS):
            clock("rest of the step", engine.step)
    return {part: 1e3 * clock.seconds[part] / STEPS for part in PARTS} | {"whole": 1e3 * whole}
