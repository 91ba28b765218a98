"""The grid of a sweep, and all other options that decide its figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lean.config import EngineConfig
from lean.errors import ConfigError
from lean.eval.corpus import Corpus
from lean.eval.environment import environment, weights_stamp
from lean.eval.score.perplexity import BosRule
from lean.eval.sweep.cells import EXACT, Cell

if TYPE_CHECKING:
    from lean.model.info import ModelInfo

NEEDLE_DEPTHS = (0.0, 50.0, 100.0)
NEEDLE_TRIALS = 3


@dataclass(frozen=True)
class Grid:
    """The cells of a sweep: every format with every residual and window, and the exact cache with every window.

    Attributes:
        max_tokens: tokens to score of the text.
        context: tokens for which the memory is computed; they are not run.
        needle_lengths, tasks: no needle test and no tasks where empty. task_limit: items of each task; None: all.
    """

    formats: tuple[str, ...]
    windows: tuple[int | None, ...]
    residuals: tuple[int, ...]
    max_tokens: int = 2048
    context: int = 4096
    bos: BosRule = "first"
    needle_lengths: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("max-tokens", self.max_tokens), ("context-of-report", self.context)):
            if value < 2:
                raise ConfigError(f"{name} {value} must be at least 2")
        for kv_dtype in self.formats:
            EngineConfig(kv_dtype)
        for window in self.windows:
            EngineConfig(window=window)
        for residual in self.residuals:
            EngineConfig(kv_residual_length=residual)

    def cells(self) -> list[Cell]:
        """The floor first, then the exact cache with each window, then the others."""
        windows = dict.fromkeys((None, *self.windows))
        exact = [Cell(EXACT, window=window) for window in windows]
        grid = [
            Cell(kv_dtype, residual, window)
            for window in dict.fromkeys(self.windows)
            for residual in self.residuals
            for kv_dtype in self.formats
        ]
        return list(dict.fromkeys((*exact, *grid)))


def describe_sweep(info: ModelInfo, base: EngineConfig, grid: Grid, corpus: Corpus) -> dict[str, Any]:
    """Plain values for ``config.yaml``. A sweep continues only in a folder with equal values."""
    choices = asdict(grid) | {"windows": ["none" if window is None else window for window in grid.windows]}
    varied = ("kv_dtype", "kv_residual_length", "window", "threads")
    engine = {key: value for key, value in asdict(base).items() if key not in varied}
    return {
        "model": {
            "name": info.source.name,
            "architecture": info.architecture,
            "parameters": info.parameters,
            "dtype": str(info.dtype).removeprefix("torch."),
            "weights": weights_stamp(info.source),
        },
        "corpus": corpus.report(),
        "grid": {key: list(value) if isinstance(value, tuple) else value for key, value in choices.items()},
        "needle": {"depths": list(NEEDLE_DEPTHS), "trials": NEEDLE_TRIALS} if grid.needle_lengths else None,
        "engine": engine,
        "environment": environment(base),
    }
