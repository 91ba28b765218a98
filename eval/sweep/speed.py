"""How fast one sequence decodes with a cache, beside the exact cache on the same machine in the same minute."""

import statistics
import time
from dataclasses import dataclass

from lean.errors import EngineError
from lean.llm import LLM
from lean.sampling_params import SamplingParams

STEPS = 12


@dataclass(frozen=True)
class Speed:
    """Decoding one sequence behind ``context`` tokens, steps of both engines taking turns.

    Attributes:
        tokens_per_s, exact_tokens_per_s: from the median step of either.
        ratio: median over the steps of (seconds of the exact cache's step) / (seconds of this cache's step right after
            it). ratio_low, ratio_high: their quartiles, which show how much the machine was disturbed.
    """

    tokens_per_s: float
    exact_tokens_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    context: int
    steps: int


class SpeedMeter:
    """Holds the exact engine's cache of a prompt, so that it is read once for many candidates."""

    def __init__(self, exact: LLM, prompt: list[int]) -> None:
        self._exact = exact
        self._prompt = prompt
        self._kept: int | None = None  # the request whose cache the next one continues

    def measure(self, candidate: LLM) -> Speed:
        """Decode with both. Raises EngineError for non-finite numbers."""
        self._kept = self._begin(self._exact, self._kept)
        self._begin(candidate)
        pairs = []
        for _ in range(STEPS + 1):
            pairs.append((_step_seconds(self._exact), _step_seconds(candidate)))
        del pairs[0]  # warm-up
        exact, own = (statistics.median(seconds) for seconds in zip(*pairs))
        low, ratio, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        return Speed(1 / own, 1 / exact, ratio, low, high, len(self._prompt), STEPS)

    def _begin(self, llm: LLM, kept: int | None = None) -> int:
        """Run the prompt and the first token behind it; the request has just the steps to go that are measured."""
        params = SamplingParams(
            max_tokens=STEPS + 2,
            temperature=0.0,
            repetition_penalty=1.0,
            ignore_eos=True,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
        )
        request = llm.add_request(self._prompt, params, keep_cache=llm is self._exact, continues=kept)
        while not _step(llm):
            pass
        return request


def _step(llm: LLM) -> int:
    """Run a step; how many tokens came of it."""
    outputs = llm.step()
    if error := next((output.error for output in outputs if output.error), None):
        raise EngineError(error)
    return len(outputs)


def _step_seconds(llm: LLM) -> float:
    started = time.perf_counter()
    _step(llm)
    return time.perf_counter() - started
