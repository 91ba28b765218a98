"""Requests on an engine, their outputs, and their outputs alone on an engine."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from engine_state import check_integrity, first_sequence, nothing_left, on_preempt, wrap_part
from tiny import tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.engine.request import Request, RequestOutput
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.store.source import resolve

TWO_LAYERS = {"num_hidden_layers": 2}
LOCAL_AND_GLOBAL = {**TWO_LAYERS, "layer_types": ["sliding_attention", "full_attention"]}
KINDS = {"llama": TWO_LAYERS, "gemma3": LOCAL_AND_GLOBAL, "mixtral": TWO_LAYERS, "gpt_oss": TWO_LAYERS}
RESIDUAL = {"kv_residual_length": 8, "sinks": 2}
FORMATS = {"fp32": {}} | {
    f"{name} {'with' if rest else 'without'} residual": rest or {"kv_residual_length": 0}
    for name in ("int8", "fp8", "k8v4", "int4")
    for rest in (RESIDUAL, {})
}
SEVERAL = [("llama", form) for form in FORMATS] + [
    ("gemma3", "int4 with residual"),
    ("gpt_oss", "k8v4 with residual"),
    ("mixtral", "int8 without residual"),
]
FEW = [("llama", "k8v4 with residual"), ("gemma3", "int4 with residual"), ("gpt_oss", "fp32")]

GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.8, "seed": 11}
PENALIZED = {**SEEDED, "repetition_penalty": 1.3}
COUNTED = {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4}


def ask(max_tokens: int, **params) -> SamplingParams:
    return SamplingParams(max_tokens, **{"ignore_eos": True, "logprobs": 0, **GREEDY, **params})


@dataclass(frozen=True)
class Job:
    """One request. ``score``: hidden states instead of an answer."""

    length: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    score: bool = False

    @property
    def prompt(self) -> list[int]:
        return tokens(self.length, seed=1000 * self.seed + self.length)


def loader(tiny: Callable) -> Callable[[str], LoadedModel]:
    """``loader(tiny)(kind)``: a model of KINDS, read once. Experts are plain products, as deterministic mode needs."""

    @functools.cache
    def read(kind: str) -> LoadedModel:
        info = inspect_model(resolve(str(tiny(kind, **KINDS[kind]))), EngineConfig(dtype="float32"))
        return load_model(info, torch.device("cpu"), deterministic=True)

    return read


def start(model: LoadedModel, form: str, **config) -> LLM:
    config = {"kv_dtype": form.split()[0], "block_size": 16, **FORMATS[form], **config}
    return LLM(model, EngineConfig(deterministic=True, **config))


class Desk:
    """Requests on one engine and all of their outputs."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.jobs: dict[int, Job] = {}
        self.requests: dict[int, Request] = {}
        self.parts: dict[int, list[RequestOutput]] = {}
        self.preempted: Counter[int] = Counter()
        self.mid_prefill: set[int] = set()

        def counted(request: Request) -> None:
            self.preempted[request.request_id] += 1
            if not request.output_token_ids and request.num_computed_tokens:
                self.mid_prefill.add(request.request_id)

        on_preempt(llm, counted)

    def add(self, job: Job, **options) -> int:
        params = None if job.score else job.params
        request_id = self.llm.add_request(options.pop("prompt", job.prompt), params, keep_hidden=job.score, **options)
        self.jobs[request_id] = job
        self.requests[request_id] = first_sequence(self.llm, request_id)
        self.parts[request_id] = []
        return request_id

    def step(self) -> None:
        for part in self.llm.step():
            self.parts[part.request_id].append(part)
        check_integrity(self.llm)

    def run(self) -> None:
        steps = 0
        while self.llm.has_work:
            self.step()
            steps += 1
            assert steps < 3000, "no end"

    def result(self, request_id: int) -> object:
        """Everything that must not depend on other requests, comparable to the bit."""
        if self.jobs[request_id].score:
            return torch.cat([part.hidden for part in self.parts[request_id]]).numpy().tobytes()
        parts = self.parts[request_id]
        return [
            (
                [token for part in parts if part.index == index for token in part.token_ids],
                [entry for part in parts if part.index == index for entry in part.logprobs or []],
                "".join(part.text for part in parts if part.index == index),
                next(part.prompt_logprobs for part in parts if part.index == index),
                next(part.finish_reason for part in parts if part.index == index and part.finish_reason),
            )
            for index in range(self.jobs[request_id].params.n)
        ]

    def all_free(self) -> None:
        nothing_left(self.llm)
        assert self.llm.stats().tokens_held == 0


class Alone:
    """``Alone(model)(kind, form, job)``: the result of a request that had an engine for itself."""

    def __init__(self, model: Callable[[str], LoadedModel]) -> None:
        self._engine = functools.cache(
            lambda kind, form: start(model(kind), form, block_size=32, max_num_seqs=4, prefix_cache=False)
        )
        self._made: dict[object, object] = {}

    def __call__(self, kind: str, form: str, job: Job) -> object:
        key = (kind, form, repr(job))
        if key not in self._made:
            desk = Desk(self._engine(kind, form))
            request_id = desk.add(job)
            desk.run()
            desk.all_free()
            assert not desk.preempted
            self._made[key] = desk.result(request_id)
        return self._made[key]


def same(desk: Desk, alone: Alone, kind: str, form: str, skip: tuple[int, ...] = ()) -> None:
    """Every request on the desk gave the same as alone, and nothing is left in the engine."""
    for request_id, job in desk.jobs.items():
        if request_id not in skip:
            assert desk.result(request_id) == alone(kind, form, job), f"{job}, preempted {desk.preempted[request_id]}x"
    desk.all_free()


def impatient(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> LLM:
    """Let a step fail that reads logits endlessly."""
    calls: Counter[str] = Counter()

    def counting(logits: Callable) -> Callable:
        def counted(hidden: torch.Tensor) -> torch.Tensor:
            calls["all"] += 1
            assert calls["all"] < 2000, "logits without end"
            return logits(hidden)

        return counted

    wrap_part(monkeypatch, llm, "logits", counting)
    return llm
