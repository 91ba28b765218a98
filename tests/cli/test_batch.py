"""Every row of the prompts becomes one line of the results, the same as if it ran alone."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from batches import PARAMS, TEXTS, USER, Engine, results, rows_of
from rich.console import Console

from lean.cli import batch
from lean.cli.batch import BatchSummary, run_batch
from lean.cli.batch_rows import Row, read_rows
from lean.config import EngineConfig
from lean.engine.logprobs import TokenLogprob
from lean.engine.request import RequestOutput
from lean.llm import LLM


@pytest.fixture(scope="module")
def llm(tiny):
    config = EngineConfig(kv_dtype="bf16", max_num_seqs=3, max_model_len=128, deterministic=True)
    return LLM(str(tiny("llama", num_hidden_layers=1)), config)


def test_a_row_gets_the_answer_it_would_get_alone_in_any_company_and_order(llm, prompts, out, console):
    values = [{"prompt": text, "id": text, "max_tokens": 38 - 5 * place} for place, text in enumerate(TEXTS)]
    values[2] |= {"temperature": 0.9, "seed": 7}
    rows = read_rows(prompts(*values))
    summary = run_batch(llm, rows, out, PARAMS, None, console)
    found = results(out)
    assert list(found) != list(TEXTS)  # the shortest end first
    for row in rows:
        params = replace(PARAMS, **row.params)
        (alone,) = llm.generate(row.prompt, params)
        assert found[row.id] == {
            "id": row.id,
            "text": alone.text,
            "token_ids": alone.token_ids,
            "finish_reason": "length",
            "prompt_tokens": len(row.prompt),
            "completion_tokens": params.max_tokens,
        }
    tokens = sum(value["max_tokens"] for value in values)
    assert summary == BatchSummary(8, 0, 0, tokens, summary.seconds)
    assert summary.seconds > 0
    out.unlink()
    run_batch(llm, rows[::-1], out, PARAMS, None, console)
    assert results(out) == found


def test_a_row_that_cannot_be_served_is_an_error_between_good_ones(llm, prompts, out, console):
    file = prompts(
        {"prompt": "good"},
        {"prompt": "x" * 200},
        {"prompt": "half \ud83d a pair", "id": "\ud83d"},
        {"messages": [USER]},
        {"prompt": "x", "n": 9},
        {"prompt": "good"},
    )
    summary = run_batch(llm, read_rows(file), out, PARAMS, None, console)
    found = results(out)
    assert (summary.done, summary.failed, summary.tokens) == (2, 4, 8)
    assert found[1]["text"] == found[6]["text"]
    assert {key: value for key, value in found[2].items() if key != "error"} == {
        "id": 2,
        "finish_reason": "error",
        "prompt_tokens": 200,
        "completion_tokens": 0,
    }
    assert "200 tokens" in found[2]["error"]
    assert (found["\ud83d"]["prompt_tokens"], found["\ud83d"]["finish_reason"]) == (None, "error")
    assert "no chat template" in found[4]["error"]
    assert "max-num-seqs" in found[5]["error"]
    assert run_batch(llm, read_rows(file), out, PARAMS, None, console).skipped == 6


def test_several_answers_are_one_row_of_choices(llm, prompts, out, console):
    params = replace(PARAMS, n=2, temperature=1.0, seed=3)
    run_batch(llm, read_rows(prompts({"prompt": "hello"}, {"prompt": "x", "n": 1})), out, params, None, console)
    found = results(out)
    alone = llm.generate("hello", params)
    choices = [
        {"index": one.index, "text": one.text, "token_ids": one.token_ids, "finish_reason": "length"} for one in alone
    ]
    assert found[1] == {
        "id": 1,
        "choices": choices,
        "finish_reason": "length",
        "prompt_tokens": 5,
        "completion_tokens": 8,
    }
    assert choices[0] != choices[1]
    assert "choices" not in found[2]


def test_log_probabilities_are_lists(llm, prompts, out, console):
    params = replace(PARAMS, logprobs=2, prompt_logprobs=0)
    run_batch(llm, read_rows(prompts({"prompt": "hello"})), out, params, None, console)
    (found,) = results(out).values()
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    assert found["logprobs"][0]["logprob"] == found["logprobs"][0]["top"][0][1] < 0
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == 5


def test_what_is_written_is_always_json(out, console):
    """Infinite log-probabilities, half surrogate pairs, line separators, an error in the middle of an answer."""
    engine = Engine()
    text = "\ud800\u2028\r\n\x00é"
    outputs = [
        RequestOutput(1, text, [3], 1, logprobs=[TokenLogprob(3, float("-inf"), ((3, float("nan")),))]),
        RequestOutput(1, "x", [], 1, "error", "numbers \udfff"),
    ]
    engine.step = lambda: [outputs.pop(0)]
    summary = run_batch(engine, rows_of("a"), out, PARAMS, None, console)
    (found,) = results(out).values()
    assert found["text"] == text + "x"
    assert found["logprobs"] == [{"token_id": 3, "logprob": None, "top": [[3, None]]}]
    assert (found["error"], found["finish_reason"], found["token_ids"]) == ("numbers \udfff", "error", [3])
    assert (summary.done, summary.failed) == (0, 1)


def test_text_is_written_as_it_is(out, console):
    run_batch(Engine(), rows_of("é😀"), out, PARAMS, None, console)
    assert '"text": "É😀"'.encode() in out.read_bytes()


def test_chat_is_passed_on_and_messages_are_chats(out, console):
    engine = Engine()
    run_batch(engine, [*rows_of("a"), Row("m", None, [USER], {})], out, PARAMS, False, console)
    assert engine.encoded == [("a", False), ("hi", "messages")]
    assert results(out)["m"]["text"] == "HI"


def test_the_engine_is_kept_fed_and_never_flooded(out, console):
    def look(step):
        assert len(engine.encoded) <= 4 + len(results(out))  # tokenized when fed
        assert len(engine.requests) == 4 or len(engine.encoded) == 20

    engine = Engine(2, look)
    run_batch(engine, rows_of(*["ab", "c"] * 10), out, PARAMS, None, console)
    assert engine.most == 4
    assert len(results(out)) == 20


def test_a_row_is_written_the_moment_it_ends(out, console):
    def look(step):
        assert len(results(out)) == step - 1

    run_batch(Engine(1, look), rows_of(*"abcdef"), out, PARAMS, None, console)


def test_without_a_terminal_progress_is_a_plain_line_now_and_then(out, console, monkeypatch):
    run_batch(Engine(1), rows_of("a"), out, PARAMS, None, console)
    assert console.file.getvalue() == ""
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr(batch, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    run_batch(Engine(1), rows_of("a", *["bb"] * 40), out, PARAMS, None, console)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "2 of 41 rows, 0.2 tokens/s, 8 min left"
    assert 20 < len(lines) < 40
    assert "\x1b" not in "".join(lines)


def test_on_a_terminal_progress_is_a_bar_that_goes_away(out):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, soft_wrap=True)
    run_batch(Engine(1), rows_of(*TEXTS), out, PARAMS, None, console)
    shown = console.file.getvalue()
    assert "rows, " in shown
    assert "tokens/s" in shown
    assert shown.rstrip().endswith("\x1b[2K")


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (200, "3 min"), (9000, "2.5 h")])
def test_durations_are_short(seconds, text):
    assert batch._duration(seconds) == text
