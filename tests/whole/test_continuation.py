"""A request that continues a kept sequence gives what a request from nothing gives, to the bit."""

from dataclasses import replace

import pytest
import torch
from desk import COUNTED, FEW, PENALIZED, SEEDED, SEVERAL, Alone, Desk, Job, ask, impatient, loader, start
from engine_state import kept_ids
from tiny import tokens

from lean import LLM, SamplingParams
from lean.engine.request import RequestOutput
from lean.model.load import LoadedModel


@pytest.fixture(scope="module")
def model(tiny):
    return loader(tiny)


@pytest.fixture(scope="module")
def alone(model):
    return Alone(model)


class Talk:
    """A conversation on a desk; every turn is compared with a request that starts from nothing."""

    def __init__(self, desk: Desk, kind: str, form: str, model: LoadedModel) -> None:
        self.desk, self.fresh = desk, start(model, form, block_size=32, max_num_seqs=1)
        self.history: list[int] = []
        self.last: int | None = None

    def turn(self, new: list[int], params: SamplingParams, **options) -> RequestOutput:
        """Add ``new`` to the history and get an answer; returns its first output."""
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
    """``talk(kind, form, **config)``; once kept sequences are released, nothing may be left."""
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
        assert kept_ids(one.desk.llm) == []


@pytest.mark.parametrize(("kind", "form"), SEVERAL)
def test_a_conversation_gives_the_same_as_requests_that_start_from_nothing(talk, kind, form):
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
        assert kept_ids(one.desk.llm) == [one.last]
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
def test_when_memory_is_short_kept_sequences_are_dropped_and_answers_stay_the_same(talk, kind, form):
    one = talk(kind, form, num_blocks=10, max_model_len=160)
    one.turn(tokens(50), ask(10))
    stranger = one.desk.add(Job(100, ask(12)))
    one.desk.run()
    assert one.desk.llm.num_preemptions == 0, "what is only kept goes first"
    assert one.desk.parts[stranger][-1].finish_reason == "length"
    assert kept_ids(one.desk.llm) == []
    assert one.turn(tokens(5), ask(10)).cached_tokens == 0
    assert one.turn(tokens(5), ask(10)).cached_tokens == 74


def test_the_oldest_kept_sequence_is_dropped_first(talk):
    one = talk("llama", "fp32", num_blocks=10, max_model_len=160)
    kept = []
    for seed in range(3):
        one.history, one.last = [], None
        one.turn(tokens(33, seed), ask(2))  # 3 blocks
        kept.append(one.last)
    one.history, one.last = [], None
    one.turn(tokens(60, 9), ask(2), keep_cache=False)  # 4 blocks, one is free
    assert kept_ids(one.desk.llm) == kept[1:]


@pytest.mark.parametrize("same_until", [0, 1, 15, 16, 17, 39])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_prompt_that_differs_in_the_middle_reuses_only_what_comes_before(talk, kind, same_until):
    """A window may have evicted keys that the first differing token sees; then everything is computed again."""
    for form in ("fp32", "int4 with residual"):
        one = talk(kind, form)
        one.turn(tokens(40), ask(4))
        other = [*one.history[:same_until], (one.history[same_until] - 3 + 1) % 256 + 3, *tokens(25, seed=3)]
        cached = one.turn([], ask(3), prompt=other).cached_tokens
        whole = kind == "llama" and form == "fp32"
        assert cached == same_until if whole else cached in (0, same_until)
        if same_until:  # without a common token the first sequence is not continued and stays
            assert one.desk.llm.stats().tokens_held == len(one.history) - 1


def test_a_prompt_that_is_the_beginning_of_what_is_kept_computes_one_token(talk):
    one = talk("llama", "int8 without residual")
    one.turn(tokens(40), ask(10))
    for length in (45, 33, 32, 1):
        assert one.turn([], ask(6), prompt=one.history[:length]).cached_tokens == length - 1


def test_an_unknown_or_already_continued_request_is_not_continued(talk):
    one = talk("llama", "int8 with residual")
    one.turn(tokens(40), ask(10))
    first, history = one.last, one.history
    assert one.turn(tokens(3), ask(4), continues=12345).cached_tokens == 0
    one.history = history
    assert one.turn(tokens(3), ask(4), continues=first).cached_tokens == len(history) - 1
    one.history = history
    assert one.turn(tokens(3), ask(4), continues=first).cached_tokens == 0, "it was continued already"
    assert one.turn(tokens(3), ask(4), continues=one.last + 1).cached_tokens == 0, "a request cannot continue itself"


def test_of_two_requests_that_continue_the_same_one_only_the_first_reuses_its_cache(talk):
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


def test_a_continued_request_reports_all_prompt_logprobs(talk, monkeypatch):
    """Log-probabilities of the prompt need every row of it, so the kept cache is not reused."""
    one = talk("llama", "int8 with residual")
    impatient(monkeypatch, one.desk.llm)
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
