"""Decode steps of a whole model, for ``lean.eval.bench_gpu``."""

import statistics

from lean.config import EngineConfig
from lean.eval.bench.peers import Lean
from lean.eval.bench.timing import seconds_of
from lean.model.load import LoadedModel


def step_seconds(model: LoadedModel, config: EngineConfig, batch: int, context: int, steps: int) -> float:
    """Median time of a decode step of ``batch`` sequences after ``context`` tokens each."""
    engine = Lean(model, config, batch)
    engine.read([i % 250 for i in range(context)])
    engine.step()
    return statistics.median(seconds_of(engine.step, model.device) for _ in range(steps))
