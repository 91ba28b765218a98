"""Decode steps on fixed tensors: what is compiled or recorded once serves every later step, and equals the eager step.

Lengths exceed the sliding window of 32 tokens, the user's window, the residual and the exact sinks.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from helpers import refusal
from tiny import KINDS, tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.decode_graph import DecodeBatch, DecodeSteps, Step, buckets
from lean.hub import resolve
from lean.model import LoadedModel, inspect_model, load_model

TWO_LAYERS = {"num_hidden_layers": 2}
SMALL = {kind: TWO_LAYERS for kind in KINDS} | {
    kind: {**TWO_LAYERS, "layer_types": ["sliding_attention", "full_attention"]} for kind in ("gemma2", "gemma3")
}
RESIDUAL = {"kv_residual_length": 8, "sinks": 2}
WINDOW = {"window": 40, "sinks": 2}
# float64, so that another number of rows, which changes the last bits of a product, flips no code of the cache. Experts
# in float64 are a loop over those that were chosen, which is no fixed graph: in float32 an exact cache has no codes.
# Mistral's layers slide on their own.
KV = {kind: {"kv_dtype": "k8v4", **RESIDUAL, **WINDOW} for kind in KINDS} | {
    "mistral": {"kv_dtype": "int8", **RESIDUAL},
    "phi3": {"kv_dtype": "int4", **RESIDUAL},
    "mixtral": {"kv_dtype": "fp32", **WINDOW},
    "gpt_oss": {"kv_dtype": "fp32", **WINDOW},
}


@pytest.fixture(scope="module")
def model(tiny):
    @functools.cache
    def read(kind: str, dtype: str | None = None) -> LoadedModel:
        dtype = dtype or ("float32" if kind in ("mixtral", "gpt_oss") else "float64")
        return load_model(inspect_model(resolve(str(tiny(kind, **SMALL[kind]))), dtype), torch.device("cpu"))

    return read


class CountingBackend:
    """torch.compile's ``eager`` back end, counting the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        self.graphs += 1
        return graph.forward


class CalledAgain:
    """Stands for CUDA graphs: a recorded step runs again on the same tensors, into the same output."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, step: Step) -> Step:
        self.recorded += 1
        output = step().clone()

        def replay() -> torch.Tensor:
            self.replayed += 1
            return output.copy_(step())

        return replay


def start(model: LoadedModel, backend: object = None, record: object = None, **config: object) -> LLM:
    llm = LLM(model, EngineConfig(**{"max_num_seqs": 4, "max_model_len": 128, "block_size": 8, **config}))
    if backend is not None or record is not None:
        llm._runner.prepare_decode(llm.config.max_num_seqs, llm.size.max_model_len, backend, record)
    return llm


def answers(llm: LLM, lengths: tuple[int, ...] = (61, 3, 33), max_tokens: int = 24) -> list[list[tuple[int, float]]]:
    """Greedy tokens and their log-probabilities; the requests end at different times, so that rows become padding."""
    ids = [
        llm.add_request(
            tokens(length, seed=length), SamplingParams(max_tokens - 5 * i, temperature=0, ignore_eos=True, logprobs=0)
        )
        for i, length in enumerate(lengths)
    ]
    found: dict[int, list] = {number: [] for number in ids}
    while llm.has_work:
        for part in llm.step():
            found[part.request_id] += [(entry.token_id, entry.logprob) for entry in part.logprobs]
    return list(found.values())


def same(got: list, want: list) -> None:
    assert [[token for token, _ in row] for row in got] == [[token for token, _ in row] for row in want]
    for one, other in zip(got, want):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-5)


def test_buckets_double_up_to_the_most_sequences():
    assert [buckets(n) for n in (1, 2, 3, 8, 12)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 12)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_decode_step_is_one_graph_per_bucket_and_equals_the_eager_step(model, kind):
    backend = CountingBackend()
    compiled = start(model(kind), backend, **KV[kind])
    assert backend.graphs == len(buckets(4))
    same(answers(compiled), answers(start(model(kind), **KV[kind])))
    assert backend.graphs == len(buckets(4)), "longer sequences compiled again"
