"""The needle test finds a needle if and only if the cache shows it, and judges answers by the value alone."""

import pytest
import torch
from helpers import refusal
from needles import TEXT, TOKENIZERS, Searcher, make_tokenizer, run, share
from tiny import byte_tokenizer

from lean import LLM, EngineConfig
from lean.engine.request import RequestOutput
from lean.errors import EngineError
from lean.eval.score.needle import ANSWER_TOKENS, ITEMS, Needle, run_needle


@pytest.fixture(scope="module", params=[(name, chat) for name in TOKENIZERS for chat in (False, True)], ids=str)
def tokenizer(request):
    return make_tokenizer(*request.param)


def test_an_engine_that_sees_the_whole_prompt_finds_every_needle(tokenizer):
    engine = Searcher(tokenizer)
    cells = run(engine, (500, 1200), (0, 50, 100), trials=3)
    assert [(cell.length, cell.depth) for cell in cells] == [(n, d) for n in (500, 1200) for d in (0, 50, 100)]
    assert share(cells) == [1] * 6
    assert engine.together == [3] * 6


def test_an_engine_that_sees_the_last_tokens_finds_only_needles_among_them():
    cells = run(Searcher(byte_tokenizer(), sees=400), (2000,), (0, 50, 100))
    assert share(cells) == [0, 0, 1]
    assert share(run(Searcher(byte_tokenizer(), sees=100), (2000,), (0, 50, 100))) == [0, 0, 0]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (" 12345", True),
        ("Answer: 12345.", True),
        ("12345\n", True),
        ("**12345**", True),
        (" 12345, I think", True),
        ("123456", False),
        ("012345", False),
        ("12345.6", False),
        ("1.12345", False),
        ("12,345", False),
        ("1234 5", False),
        ("1234", False),
        ("12354", False),
        ("", False),
    ],
)
def test_only_the_value_itself_is_an_answer(answer, found):
    assert Needle("red piano", "12345").found_in(answer) is found


def test_an_answer_has_room_for_a_value_of_one_token_per_character():
    assert len(byte_tokenizer()(" 12345. ")["input_ids"]) <= ANSWER_TOKENS


def test_progress_is_reported_after_every_cell():
    reported = []
    run(Searcher(byte_tokenizer()), (500, 600), (0, 50), trials=3, progress=reported.append)
    assert reported == [3, 3, 3, 3]


def test_cells_come_as_they_are_done():
    engine = Searcher(byte_tokenizer())
    cells = run_needle(engine, TEXT, (500, 600), (0, 50), trials=1)
    assert engine.together == []
    next(cells)
    assert engine.together == [1]


def test_a_failed_request_is_an_error_and_not_a_lost_needle(monkeypatch):
    engine = Searcher(byte_tokenizer())
    monkeypatch.setattr(engine, "answer", lambda ids: RequestOutput(0, "", [], len(ids), "error", "non-finite"))
    with pytest.raises(EngineError, match="non-finite"):
        run(engine)


# --- an engine ---


def test_a_deterministic_engine_answers_the_same_alone_and_in_company(tiny, monkeypatch):
    model = LLM(str(tiny("llama")), EngineConfig(deterministic=True)).model
    answers = {}
    for count in (1, 4):
        llm = LLM(model, EngineConfig(deterministic=True, max_num_seqs=count))
        generate = llm.generate

        def kept(*args, count=count, generate=generate):
            outputs = generate(*args)
            answers.setdefault(count, []).extend(output.token_ids for output in outputs)
            return outputs

        monkeypatch.setattr(llm, "generate", kept)
        run(llm, (360, 400), (50,), trials=3)
    assert answers[1] == answers[4]
    assert len(answers[1]) == 6


def test_lengths_beyond_the_engine_are_refused_before_anything_runs(tiny):
    llm = LLM(str(tiny("llama")), EngineConfig(max_num_seqs=1))
    limit = llm.size.max_model_len - ANSWER_TOKENS
    message = refusal(run_needle, llm, TEXT, (400, limit + 1), (0,))
    assert str(limit + 1) in message
    assert message.endswith(f"at most {limit}")
    assert not llm.has_work
    assert share(run(llm, (limit,), (0,), trials=1)) == [0]
    paged = LLM(llm.model, EngineConfig(num_blocks=14, max_num_seqs=1))  # 448 tokens
    assert "max-model-len 448" in refusal(run_needle, paged, TEXT, (440,), (0,))
    assert share(run(paged, (436,), (0,), trials=1)) == [0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": (500, 100)}, "length 100 cannot hold a needle"),
        ({"lengths": ()}, "at least one length"),
        ({"depths": ()}, "one depth"),
        ({"depths": (50, 101)}, "got 101"),
        ({"depths": (-1,)}, "from 0 to 100"),
        ({"depths": (float("nan"),)}, "from 0 to 100"),
        ({"trials": 0}, "trials must be"),
        ({"trials": len(ITEMS) + 1}, "trials must be"),
        ({"text": " \n"}, "is empty"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_runs(options, words):
    engine = Searcher(byte_tokenizer())
    arguments = {"text": TEXT, "lengths": (500,), "depths": (50,), **options}
    assert words in refusal(run_needle, engine, **arguments)
    assert engine.together == []


# --- a real model ---


@pytest.mark.slow
def test_the_demo_model_finds_needles_in_its_cache_and_loses_needles_beyond_a_window():
    from lean.store.pull import pull

    torch.set_num_threads(2)
    # float32: many CPUs have no products in bfloat16, and take five times as long.
    exact = LLM(str(pull("smollm2-135m")), EngineConfig(kv_dtype="auto", dtype="float32"))
    assert sum(cell.correct for cell in run(exact, (512,), (0, 50, 100), trials=3)) >= 8
    windowed = LLM(exact.model, EngineConfig(kv_dtype="auto", window=128))
    lost, lost_too, kept = run(windowed, (512,), (0, 50, 100), trials=3)
    assert lost.correct == lost_too.correct == 0
    assert kept.correct >= 2
