"""Decoding speed of one sequence with a cache, compared with the exact cache in the same run."""

import statistics
import time
from dataclasses import dataclass

from lean.eval.decoding import greedy, raise_failed
from lean.llm import LLM

STEPS = 12


@dataclass(frozen=True)
class Speed:
    """Decoding one sequence after ``context`` tokens. Steps of both engines take turns.

    Attributes:
        tokens_per_s, exact_tokens_per_s: from the median step of each engine.
        ratio: median over the steps of (seconds of the exact cache's step) / (seconds of this cache's next step).
        ratio_low, ratio_high: quartiles of these ratios; they show how noisy the machine was.
    """

    tokens_per_s: float
    exact_tokens_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    context: int
    steps: int


class SpeedMeter:
    """Decodes after one prompt. The exact engine finds the prompt in its prefix cache from the second time on."""

    def __init__(self, exact: LLM, prompt: list[int]) -> None:
        self._exact = exact
        self._prompt = prompt

    def measure(self, candidate: LLM) -> Speed:
        """Decode with both. Raises EngineError for non-finite numbers."""
        self._begin(self._exact)
        self._begin(candidate)
        pairs = []
        for _ in range(STEPS + 1):
            pairs.append((_step_seconds(self._exact), _step_seconds(candidate)))
        del pairs[0]  # warm-up
        exact, own = (statistics.median(seconds) for seconds in zip(*pairs))
        low, ratio, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        return Speed(1 / own, 1 / exact, ratio, low, high, len(self._prompt), STEPS)

    def _begin(self, llm: LLM) -> None:
        """Compute the prompt and its first new token. The steps that remain are those to measure."""
        llm.add_request(self._prompt, greedy(STEPS + 2))
        while not _step(llm):
            pass


def _step(llm: LLM) -> int:
    """Run a step and return its number of outputs. Raises EngineError for a failed request."""
    outputs = llm.step()
    raise_failed(outputs)
    return len(outputs)


def _step_seconds(llm: LLM) -> float:
    started = time.perf_counter()
    _step(llm)
    return time.perf_counter() - started
