"""Requests of evaluations: greedy decoding to a fixed length, and the error of a request that failed."""

from collections.abc import Iterable

from lean.engine.request import RequestOutput
from lean.errors import EngineError
from lean.sampling_params import SamplingParams


def greedy(max_tokens: int) -> SamplingParams:
    """Exactly ``max_tokens`` greedy tokens. A repetition penalty among the model's defaults has no effect."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)


def raise_failed(outputs: Iterable[RequestOutput]) -> None:
    """Raise EngineError for the first output of a request that failed or was aborted."""
    for output in outputs:
        if output.finish_reason in ("error", "abort"):
            raise EngineError(output.error or "the request was aborted")
