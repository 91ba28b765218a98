"""A request's numbers do not depend on its company: alone, beside others, preempted, forked or continued, to the bit.

What is compared are token ids, log-probabilities and, of scoring requests, hidden states. Deterministic mode, one
thread; lengths exceed the sliding window of 32 tokens, the residual and the exact sinks.
"""

import functools
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers import refusal
from tiny import tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.engine.request import Request, RequestOutput
from lean.errors import RequestError
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


JOBS = [
    Job(40, ask(5)),
    Job(3, ask(6, **PENALIZED)),
    Job(35, ask(4, **COUNTED)),
    Job(17, ask(5, n=3, **SEEDED)),
    Job(45, score=True),
    Job(20, ask(3, prompt_logprobs=2)),
    Job(1, ask(8)),
    Job(31, ask(4, n=2)),
    Job(48, ask(3, **SEEDED)),
    Job(5, ask(4, top_p=0.9, min_p=0.01, top_k=50, **SEEDED)),
    Job(33, score=True),
    Job(16, ask(2, logit_bias={70: 5.0}, logprobs=3)),
    Job(8, ask(5, n=2, **PENALIZED)),
    Job(37, ask(3, prompt_logprobs=0, **SEEDED)),
    Job(2, score=True),
    Job(26, ask(5, **COUNTED)),
]


@pytest.fixture(scope="module")
def model(tiny):
    """Experts as plain products, as deterministic mode needs them."""

    @functools.cache
    def read(kind: str) -> LoadedModel:
        info = inspect_model(resolve(str(tiny(kind, **KINDS[kind]))), EngineConfig(dtype="float32"))
        return load_model(info, torch.device("cpu"), deterministic=True)

    return read


def start(model: LoadedModel, form: str, **config) -> LLM:
    config = {"kv_dtype": form.split()[0], "block_size": 16, **FORMATS[form], **config}
    return LLM(model, EngineConfig(deterministic=True, **config))


class Desk:
    """Requests on one engine and everything that came out of them."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.jobs: dict[int, Job] = {}
        self.requests: dict[int, Request] = {}
        self.parts: dict[int, list[RequestOutput]] = {}
        self.preempted: Counter[int] = Counter()
        self.mid_prefill: set[int] = set()
        preempt = llm._scheduler._preempt

        def counted(request: Request) -> None:
            self.preempted[request.request_id] += 1
            if not request.output_token_ids and request.num_computed_tokens:
                self.mid_prefill.add(request.request_id)
            preempt(request)

        llm._scheduler._preempt = counted

    def add(self, job: Job, **options) -> int:
        params = None if job.score else job.params
        request_id = self.llm.add_request(options.pop("prompt", job.prompt), params, keep_hidden=job.score, **options)
        self.jobs[request_id] = job
        self.requests[request_id] = self.llm._requests[request_id][0]
        self.parts[request_id] = []
        return request_id

    def step(self) -> None:
        for part in self.llm.step():
            self.parts[part.request_id].append(part)
        self.llm._manager.check_integrity()

    def run(self) -> None:
        steps = 0
        while self.llm.has_work:
            self.step()
            steps += 1
            assert steps < 3000, "no end"

    def result(self, request_id: int) -> object:
        """All that must not depend on company, comparable to the bit."""
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
        self.llm._manager.check_integrity()
        assert all((p.num_free, p.num_used) == (p.num_blocks, 0) for p in self.llm._manager.pools)
        assert self.llm.stats().tokens_held == 0
        assert self.llm._requests == {}


@pytest.fixture(scope="module")
def alone(model):
    """``alone(kind, form, job)``: the result of a request that had an engine for itself."""

    @functools.cache
    def engine(kind: str, form: str) -> LLM:
        return start(model(kind), form, block_size=32, max_num_seqs=4)

    made: dict[object, object] = {}

    def result(kind: str, form: str, job: Job) -> object:
        key = (kind, form, repr(job))
        if key not in made:
            desk = Desk(engine(kind, form))
            request_id = desk.add(job)
            desk.run()
            desk.all_free()
            assert not desk.preempted
            made[key] = desk.result(request_id)
        return made[key]

    return result


def same(desk: Desk, alone, kind: str, form: str, skip: tuple[int, ...] = ()) -> None:
    """Every request on the desk ended as it does alone, and left nothing behind."""
    for request_id, job in desk.jobs.items():
        if request_id not in skip:
            assert desk.result(request_id) == alone(kind, form, job), f"{job}, preempted {desk.preempted[request_id]}x"
    desk.all_free()


@pytest.mark.parametrize(("kind", "form"), SEVERAL)
def test_a_request_alone_is_the_request_in_a_crowd_in_any_order_and_after_a_cancelled_one(model, alone, kind, form):
    shuffled = random.Random(form).sample(JOBS, len(JOBS))
    many = kind == "llama" and form in ("fp32", "int4 with residual")
    crowds = [shuffled[:2], shuffled[2:7], shuffled] + [JOBS, JOBS[::-1]] * many
    for number, crowd in enumerate(crowds):
        # Steps of 24 tokens mix pieces of several prompts; blocks of the cancelled request go to the later ones.
        llm = start(
            model(kind), form, prefill_chunk=(16, 7, 13)[number % 3], max_num_seqs=16, max_num_batched_tokens=24
        )
        desk = Desk(llm)
        cancelled = desk.add(Job(60, ask(50)))
        for job in crowd:
            desk.add(job)
        for _ in range(2 + number):
            desk.step()
        llm.abort(cancelled)
        desk.run()
        assert desk.parts[cancelled][-1].finish_reason == "abort"
        same(desk, alone, kind, form, skip=(cancelled,))


@pytest.mark.parametrize(("kind", "form"), SEVERAL)
def test_a_preempted_request_is_the_request_left_alone_and_so_are_preempted_siblings(model, alone, kind, form):
    desk = Desk(start(model(kind), form, block_size=8, num_blocks=13))
    old = desk.add(Job(36, ask(13)))
    forked = desk.add(Job(23, ask(18, n=3, **PENALIZED)))
    young = desk.add(Job(16, ask(12, **COUNTED)))
    desk.run()
    assert [desk.preempted[request_id] for request_id in (old, forked, young)] == [0, 2, 1]
    same(desk, alone, kind, form)


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_a_request_preempted_twice_is_the_request_left_alone(model, alone, kind, form):
    """The youngest comes back when the first has ended, and has to go again."""
    desk = Desk(start(model(kind), form, block_size=8, num_blocks=11))
    desk.add(Job(32, ask(20)))
    desk.add(Job(18, ask(39, **COUNTED)))
    youngest = desk.add(Job(7, ask(32, **PENALIZED)))
    desk.run()
    assert desk.preempted[youngest] == 2
    same(desk, alone, kind, form)


@pytest.mark.parametrize(
    ("kind", "form"), [*FEW, ("llama", "int8 with residual"), ("mixtral", "int4 without residual")]
)
def test_forked_siblings_are_the_request_alone(model, alone, kind, form):
    """Greedy ones all equal the lone answer; the first sampled one does, and the others differ from it."""
    for length in (16, 45):  # full blocks only, and a part of one that is shared
        desk = Desk(start(model(kind), form, prefill_chunk=20, max_num_seqs=7, max_num_batched_tokens=32))
        greedy = desk.add(Job(length, ask(8, n=4)))
        seeded = desk.add(Job(length, ask(8, n=3, **PENALIZED)))
        desk.run()
        (single,) = alone(kind, form, Job(length, ask(8)))
        assert desk.result(greedy) == [single] * 4
        (first,) = alone(kind, form, Job(length, ask(8, **PENALIZED)))
        results = desk.result(seeded)
        assert results[0] == first
        assert results[1] != first != results[2]
        same(desk, alone, kind, form)


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_a_request_preempted_amid_its_prompt_reports_every_prompt_logprob_once(model, alone, kind, form):
    """Chunks of two tokens are slow enough for the answer of an older request to take the blocks of a prompt."""
    desk = Desk(start(model(kind), form, block_size=8, num_blocks=14, prefill_chunk=2))
    desk.add(Job(20, ask(60)))
    long = desk.add(Job(70, ask(6, prompt_logprobs=2)))
    desk.run()
    assert long in desk.mid_prefill
    ((_, _, _, found, _),) = desk.result(long)
    assert [entry and entry.token_id for entry in found] == [None, *desk.jobs[long].prompt[1:]]
    same(desk, alone, kind, form)


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_a_scoring_request_preempted_amid_its_text_gives_every_row_once(model, alone, kind, form):
    desk = Desk(start(model(kind), form, block_size=8, num_blocks=14, prefill_chunk=2))
    desk.add(Job(20, ask(60)))
    scored = desk.add(Job(70, score=True))
    desk.run()
    assert scored in desk.mid_prefill
    same(desk, alone, kind, form)


# --- continuation ---


class Talk:
    """A conversation on a desk; every turn is compared with a request that starts from nothing."""

    def __init__(self, desk: Desk, kind: str, form: str, model: LoadedModel) -> None:
        self.desk, self.fresh = desk, start(model, form, block_size=32, max_num_seqs=1)
        self.history: list[int] = []
        self.last: int | None = None

    def turn(self, new: list[int], params: SamplingParams, **options) -> RequestOutput:
        """Say ``new`` after all that was said; returns the first output of the answer."""
        prompt = options.pop("prompt", self.history + new)
        options = {"keep_cache": True, "continues": self.last, **options}
        self.last = self.desk.add(Job(len(prompt), params), prompt=prompt, **options)
        self.desk.run()
        found = self.desk.parts[self.last]
        (want,) = self.fresh.generate([prompt], params)
        assert [token for part in found for token in part.token_ids] == want.token_ids
        assert [entry for part in found for entry in part.logprobs] == want.logprobs
        assert "".join(part.text for part in found) == want.text
        self.history = prompt + want.token_ids
        return found[0]


@pytest.fixture
def talk(model):
    """``talk(kind, form, **config)``; at the end nothing but what is kept may be held, and then nothing."""
    made: list[Talk] = []

    def begin(kind: str, form: str, **config) -> Talk:
        desk = Desk(start(model(kind), form, **{"prefill_chunk": 24, **config}))
        made.append(Talk(desk, kind, form, model(kind)))
        return made[-1]

    yield begin
    for one in made:
        for request_id in one.desk.jobs:
            one.desk.llm.release(request_id)
        one.desk.all_free()
        assert one.desk.llm._scheduler.kept == {}


@pytest.mark.parametrize(("kind", "form"), SEVERAL)
def test_a_conversation_is_the_request_that_starts_from_nothing(talk, kind, form):
    """Everything but the last token drawn is in the cache already."""
    one = talk(kind, form)
    assert one.turn(tokens(30), ask(5)).cached_tokens == 0
    for seed, params in enumerate((ask(4, **PENALIZED), ask(1), ask(9, **COUNTED), ask(3, **SEEDED))):
        held = len(one.history) - 1
        assert one.turn(tokens(1 + 11 * seed, seed), params).cached_tokens == held


def test_only_the_last_turn_is_kept(talk):
    one = talk("llama", "k8v4 with residual")
    for seed in range(3):
        one.turn(tokens(20, seed), ask(5))
        assert list(one.desk.llm._scheduler.kept) == [one.last]
        assert one.desk.llm.stats().tokens_held == len(one.history) - 1
    one.desk.llm.release(one.last)
    one.desk.all_free()
    one.desk.llm.release(one.last)
    one.desk.llm.release(987)
    assert one.turn(tokens(4), ask(5)).cached_tokens == 0


@pytest.mark.parametrize("form", ["fp32", "int4 with residual", "k8v4 without residual"])
def test_two_conversations_beside_each_other_keep_apart(talk, form):
    one, two = talk("llama", form), None
    two = Talk(one.desk, "llama", form, one.fresh.model)
    for seed in range(3):
        for each in (one, two):
            held = len(each.history) - 1
            assert each.turn(tokens(13, seed + 5 * (each is two)), ask(4)).cached_tokens == max(0, held)


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_when_memory_is_short_kept_sequences_go_and_answers_stay(talk, kind, form):
    one = talk(kind, form, num_blocks=10, max_model_len=160)
    one.turn(tokens(50), ask(10))
    stranger = one.desk.add(Job(100, ask(12)))
    one.desk.run()
    assert one.desk.llm.num_preemptions == 0, "what is only kept goes first"
    assert one.desk.parts[stranger][-1].finish_reason == "length"
    assert one.desk.llm._scheduler.kept == {}
    assert one.turn(tokens(5), ask(10)).cached_tokens == 0
    assert one.turn(tokens(5), ask(10)).cached_tokens == 74


def test_the_oldest_kept_sequence_goes_first(talk):
    one = talk("llama", "fp32", num_blocks=10, max_model_len=160)
    kept = []
    for seed in range(3):
        one.history, one.last = [], None
        one.turn(tokens(33, seed), ask(2))  # 3 blocks
        kept.append(one.last)
    one.history, one.last = [], None
    one.turn(tokens(60, 9), ask(2), keep_cache=False)  # 4 blocks, one is free
    assert list(one.desk.llm._scheduler.kept) == kept[1:]


@pytest.mark.parametrize("same_until", [0, 1, 15, 16, 17, 39])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_prompt_that_differs_in_the_middle_reuses_only_what_comes_before(talk, kind, same_until):
    """Windows may have let go of what the differing token sees; then all is computed again."""
    for form in ("fp32", "int4 with residual"):
        one = talk(kind, form)
        one.turn(tokens(40), ask(4))
        other = [*one.history[:same_until], (one.history[same_until] - 3 + 1) % 256 + 3, *tokens(25, seed=3)]
        cached = one.turn([], ask(3), prompt=other).cached_tokens
        whole = kind == "llama" and form == "fp32"
        assert cached == same_until if whole else cached in (0, same_until)
        if same_until:  # of nothing there is nothing to continue, and the first one stays
            assert one.desk.llm.stats().tokens_held == len(one.history) - 1


def test_a_prompt_that_is_the_beginning_of_what_is_kept_computes_one_token(talk):
    one = talk("llama", "int8 without residual")
    one.turn(tokens(40), ask(10))
    for length in (45, 33, 32, 1):
        assert one.turn([], ask(6), prompt=one.history[:length]).cached_tokens == length - 1


def test_what_is_not_there_to_be_continued_is_ignored(talk):
    one = talk("llama", "int8 with residual")
    one.turn(tokens(40), ask(10))
    first, history = one.last, one.history
    assert one.turn(tokens(3), ask(4), continues=12345).cached_tokens == 0
    one.history = history
    assert one.turn(tokens(3), ask(4), continues=first).cached_tokens == len(history) - 1
    one.history = history
    assert one.turn(tokens(3), ask(4), continues=first).cached_tokens == 0, "it was continued already"
    assert one.turn(tokens(3), ask(4), continues=one.last + 1).cached_tokens == 0, "oneself"


def test_of_two_that_continue_one_only_the_first_reuses_it(talk):
    one = talk("llama", "k8v4 with residual")
    one.turn(tokens(40), ask(10))
    prompts = [[*one.history, *tokens(7, seed)] for seed in (1, 2)]
    ids = [one.desk.add(Job(len(p), ask(9)), prompt=p, continues=one.last) for p in prompts]
    one.desk.run()
    assert [one.desk.parts[i][0].cached_tokens for i in ids] == [len(one.history) - 1, 0]
    for request_id, want in zip(ids, one.fresh.generate(prompts, ask(9))):
        assert [token for part in one.desk.parts[request_id] for token in part.token_ids] == want.token_ids


@pytest.mark.parametrize("steps", [1, 2, 4, 9])
def test_a_cancelled_turn_can_be_continued_too(talk, steps):
    one = talk("llama", "int4 with residual")
    request_id = one.desk.add(Job(40, ask(30)), keep_cache=True)
    for _ in range(steps):
        one.desk.step()
    request = one.desk.requests[request_id]
    computed = request.num_computed_tokens
    one.desk.llm.abort(request_id)
    one.desk.run()
    one.last, one.history = request_id, request.tokens(0, request.num_tokens)
    assert one.turn(tokens(5), ask(8)).cached_tokens == computed


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_a_continued_request_that_is_preempted_gives_the_same_answer(talk, alone, kind, form):
    one = talk(kind, form, block_size=8, num_blocks=12)
    one.turn(tokens(21), ask(4))
    old = one.desk.add(Job(40, ask(20)))
    one.turn(tokens(8), ask(20))
    assert one.desk.preempted[one.last]
    assert one.desk.result(old) == alone(kind, form, one.desk.jobs[old])


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_siblings_can_continue_a_kept_sequence(talk, kind, form):
    one = talk(kind, form)
    one.turn(tokens(21), ask(10))
    prompt, params = [*one.history, *tokens(6)], ask(12, n=3, **SEEDED)
    request_id = one.desk.add(Job(len(prompt), params), prompt=prompt, continues=one.last)
    one.desk.run()
    want = one.fresh.config
    fresh = LLM(one.fresh.model, replace(want, max_num_seqs=3)).generate([prompt], params)
    assert [row[:2] for row in one.desk.result(request_id)] == [(out.token_ids, out.logprobs) for out in fresh]
    cached = {part.index: part.cached_tokens for part in one.desk.parts[request_id]}
    assert cached == dict.fromkeys(range(3), len(one.history) - 1)


# --- combinations that went wrong once ---


@pytest.fixture
def impatient(monkeypatch):
    """A step that reads logits for ever fails instead."""

    def limit(llm: LLM) -> LLM:
        calls, logits = Counter(), llm._runner.logits

        def counted(hidden: torch.Tensor) -> torch.Tensor:
            calls["all"] += 1
            assert calls["all"] < 2000, "logits without end"
            return logits(hidden)

        monkeypatch.setattr(llm._runner, "logits", counted)
        return llm

    return limit


@pytest.mark.parametrize("length", [1, 2, 20, 40])
def test_every_sibling_reports_the_prompt_logprobs(model, alone, impatient, length):
    desk = Desk(impatient(start(model("llama"), "fp32", prefill_chunk=16)))
    forked = desk.add(Job(length, ask(6, n=3, prompt_logprobs=1)))
    desk.run()
    (single,) = alone("llama", "fp32", Job(length, ask(6, prompt_logprobs=1)))
    assert desk.result(forked) == [single] * 3


def test_a_continued_request_reports_all_prompt_logprobs(talk, impatient):
    """They need every row of the prompt, so what is kept does not help."""
    one = talk("llama", "int8 with residual")
    impatient(one.desk.llm)
    one.turn(tokens(40), ask(6))
    for new in (1, 30):
        prompt = one.history + tokens(new)
        found = one.turn(tokens(new), ask(6, prompt_logprobs=1)).prompt_logprobs
        assert [entry and entry.token_id for entry in found] == [None, *prompt[1:]]
        assert found == one.fresh.generate([prompt], ask(6, prompt_logprobs=1))[0].prompt_logprobs


def test_a_scoring_request_that_continues_one_gives_every_row(talk):
    one = talk("llama", "int8 with residual")
    one.turn(tokens(40), ask(6))
    job = Job(len(one.history), score=True)
    request_id = one.desk.add(job, prompt=one.history, continues=one.last)
    one.desk.run()
    rows = torch.cat([rows for _, rows in one.fresh.hidden_states(one.history)])
    assert one.desk.result(request_id) == rows.numpy().tobytes()


def test_a_scoring_request_asked_for_n_times_ends_or_is_refused(model):
    llm = start(model("llama"), "fp32")
    with suppress(RequestError):
        llm.add_request(tokens(5), SamplingParams(n=2), keep_hidden=True)
    for _ in range(5):
        llm.step()
    assert llm._requests == {}


def test_prompt_logprobs_of_an_id_that_is_no_token_hurt_nobody_else(model, impatient):
    """Rows 259 .. 263 of the output layer belong to no token. Refused, or ended with an error, as one likes."""
    llm = impatient(start(model("llama"), "fp32"))
    with suppress(RequestError):
        llm.add_request([5, 262, 7], ask(3, prompt_logprobs=0))
    good = llm.add_request(tokens(5), ask(3))
    parts = [part for _ in range(6) for part in llm.step()]
    assert [part.finish_reason for part in parts if part.request_id == good] == [None, None, "length"]
    assert not llm.has_work


def test_n_beyond_max_num_seqs_and_n_with_keep_cache_are_refused(model):
    llm = start(model("llama"), "fp32", max_num_seqs=2)
    assert "--max-num-seqs" in refusal(llm.add_request, tokens(5), ask(3, n=3))
    assert "2" in refusal(llm.add_request, tokens(5), ask(3, n=2), keep_cache=True)
    assert not llm.has_work
