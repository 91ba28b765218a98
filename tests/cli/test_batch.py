"""Every row of the prompts becomes one line of the results, exactly once, whatever happens in between."""

import fcntl
import io
import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import refusal
from rich.console import Console

from lean.cli import batch
from lean.cli.batch import BatchSummary, run_batch
from lean.cli.batch_results import read_done
from lean.cli.batch_rows import Row, read_rows
from lean.config import EngineConfig
from lean.engine.request import RequestOutput, SamplingParams
from lean.engine.sampler import TokenLogprob
from lean.errors import EngineError, LeanError, RequestError
from lean.llm import LLM

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def prompts(tmp_path):
    """``prompts(*lines)``: a file of them; objects become JSON."""

    def write(*lines):
        texts = (line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
        (tmp_path / "prompts.jsonl").write_bytes(b"".join(text + b"\n" for text in texts))
        return tmp_path / "prompts.jsonl"

    return write


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def llm(tiny):
    config = EngineConfig(kv_dtype="bf16", max_num_seqs=3, max_model_len=128, deterministic=True)
    return LLM(str(tiny("llama", num_hidden_layers=1)), config)


class Engine:
    """Answers a prompt with its own letters in upper case, one a step, for max_num_seqs requests at a time.

    ``before_step`` is called with the number of the step, and may raise.
    """

    def __init__(self, max_num_seqs=2, before_step=lambda step: None):
        self.config = SimpleNamespace(max_num_seqs=max_num_seqs)
        self.before_step = before_step
        self.steps = self.most = 0
        self.encoded, self.aborted = [], []
        self.requests = {}

    @property
    def has_work(self):
        return bool(self.requests)

    def encode(self, prompt, *, chat=None):
        if prompt.startswith("bad"):
            raise RequestError("it is bad")
        self.encoded.append((prompt, chat))
        return [ord(letter) for letter in prompt]

    def encode_chat(self, messages):
        return self.encode(" ".join(message["content"] for message in messages), chat="messages")

    def add_request(self, ids, params):
        if len(ids) > 50:
            raise RequestError("it is long")
        number = len(self.encoded)
        self.requests[number] = (ids, 0, params)
        self.most = max(self.most, len(self.requests))
        return number

    def abort(self, number):
        self.aborted.append(number)
        self.requests.pop(number, None)

    def step(self):
        self.steps += 1
        self.before_step(self.steps)
        outputs = []
        for number, (ids, place, params) in list(self.requests.items())[: self.config.max_num_seqs]:
            last = place + 1 == min(len(ids), params.max_tokens)
            text = chr(ids[place]).upper()
            outputs.append(RequestOutput(number, text, [ids[place]], len(ids), "length" if last else None))
            self.requests[number] = (ids, place + 1, params)
            if last:
                del self.requests[number]
        return outputs


def rows_of(*texts):
    return [Row(number, text, None, {}) for number, text in enumerate(texts, 1)]


def results(out):
    """The lines by id; every id once, every line whole."""
    data = out.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    found = [json.loads(line) for line in data.split(b"\n")[:-1]]
    by_id = {result["id"]: result for result in found}
    assert len(by_id) == len(found)
    return by_id


TEXTS = ("one", "three", "seven", "a", "longer ones", "bb", "ccc", "dddd")


# --- reading prompts ---


def test_rows_are_read_with_their_ids_and_parameters(prompts):
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "é"}]
    file = prompts(
        b"\xef\xbb\xbf" + '{"prompt": "é\\n😀"}'.encode(),
        b"",
        b" \t\r",
        {"messages": messages, "id": "a"},
        b'{"id": -7, "prompt": "x", "temperature": 0.5, "max_tokens": 3, "stop": ["\\n"], "top_k": null}\r',
        {"id": "1", "prompt": "not the id of the first"},
    )
    assert read_rows(file) == [
        Row(1, "é\n😀", None, {}),
        Row("a", None, messages, {}),
        Row(-7, "x", None, {"temperature": 0.5, "max_tokens": 3, "stop": ["\n"], "top_k": None}),
        Row("1", "not the id of the first", None, {}),
    ]


USER = {"role": "user", "content": "hi"}
BAD_LINES = {
    "half an object": (b'{"prompt": "x"', "not JSON"),
    "two objects": (b'{"prompt": "x"} {"prompt": "y"}', "not JSON: Extra data"),
    "no object": (b'["x"]', "JSON object"),
    "text": (b"Why is the sky blue?", "not JSON"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', "NaN"),
    "deep": (b'{"prompt":' + b"[" * 100_000, "not JSON"),
    "long number": (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "not JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not UTF-8 text: invalid start byte at byte 12"),
    "UTF-16": ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
    "unknown key": ({"prompt": "x", "max-tokens": 3}, '"max-tokens"; known keys are id, prompt, messages,'),
    "neither": ({"id": 3}, "prompt or messages"),
    "both": ({"prompt": "x", "messages": [USER]}, "not both"),
    "prompt of ids": ({"prompt": [1, 2]}, "prompt must be a string"),
    "prompt null": ({"prompt": None}, "prompt must be a string"),
    "empty": ({"prompt": ""}, "prompt is empty"),
    "messages text": ({"messages": "hi"}, "messages must be a list"),
    "no messages": ({"messages": []}, "at least one message"),
    "message text": ({"messages": [USER, "hi"]}, "messages[1]"),
    "no content": ({"messages": [{"role": "user"}]}, "content"),
    "no role": ({"messages": [{"content": "hi"}]}, "role"),
    "unknown role": ({"messages": [{"role": "robot", "content": "hi"}]}, '"robot"'),
    "id of truth": ({"prompt": "x", "id": True}, "id must be"),
    "id real": ({"prompt": "x", "id": 1.0}, "id must be"),
    "id null": ({"prompt": "x", "id": None}, "id must be"),
    "id again": ({"prompt": "x", "id": "a"}, 'id "a" is already used in line 1'),
    "id of a line": ({"prompt": "x", "id": 3}, "id 3 is already used in line 3"),
    "temperature": ({"prompt": "x", "temperature": -1}, "temperature must be"),
    "max_tokens": ({"prompt": "x", "max_tokens": "4"}, "max-tokens must be"),
    "max_tokens null": ({"prompt": "x", "max_tokens": None}, "max-tokens must be"),
    "stop": ({"prompt": "x", "stop": 3}, "stop must be"),
    "logit_bias": ({"prompt": "x", "logit_bias": {"a": 1}}, "logit-bias must"),
}


@pytest.mark.parametrize(("line", "word"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_row_is_named_with_file_and_line(prompts, line, word):
    file = prompts({"prompt": "x", "id": "a"}, b"", {"prompt": "x"}, line, {"prompt": "y"})
    message = refusal(read_rows, file)
    assert message.startswith(f"{file} line 4: ")
    assert word in message
    assert len(message) < 600


def test_a_file_that_is_none_is_refused(prompts, tmp_path):
    assert "No such file" in refusal(read_rows, tmp_path / "none")
    assert "directory" in refusal(read_rows, tmp_path)
    assert "cannot read" in refusal(read_rows, "\0")
    assert "has no rows" in refusal(read_rows, prompts())
    assert "has no rows" in refusal(read_rows, prompts(b"", b" "))


def test_a_row_without_an_end_of_line_is_a_row(tmp_path):
    (tmp_path / "p").write_bytes(b'{"prompt": "x"}\n{"prompt": "y"}')
    assert [row.prompt for row in read_rows(tmp_path / "p")] == ["x", "y"]


# --- answers ---


def test_a_row_gets_what_it_would_get_alone_whatever_its_company_and_order(llm, prompts, out, console):
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


# --- ends before the end ---


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("kernel"), MemoryError])
@pytest.mark.parametrize("when", range(1, 12))
def test_an_end_in_the_middle_loses_the_running_rows_only_and_the_next_run_goes_on(out, console, error, when):
    def end(step):
        if step == when:
            raise error

    engine = Engine(2, end)
    rows = rows_of(*TEXTS, "bad one")
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        run_batch(engine, rows, out, PARAMS, None, console)
    assert not engine.requests
    written = results(out)
    started = len(engine.encoded)
    assert len(written) == started - len(engine.aborted) + (9 in written)
    assert len(engine.aborted) <= 4
    assert f"{len(written)} of 9 rows are in {out}" in console.file.getvalue()
    summary = run_batch(Engine(2), rows, out, PARAMS, None, console)
    assert (summary.skipped, summary.done + summary.failed) == (len(written), 9 - len(written))
    assert {key: value.get("text") for key, value in results(out).items()} == {
        **{number: text[:4].upper() for number, text in enumerate(TEXTS, 1)},
        9: None,
    }


def test_a_killed_run_goes_on_where_it_was(out, console):
    rows = rows_of(*TEXTS)
    child = os.fork()
    if child == 0:
        try:
            run_batch(
                Engine(2, lambda step: step == 7 and os.kill(os.getpid(), signal.SIGKILL)),
                rows,
                out,
                PARAMS,
                None,
                console,
            )
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    written = results(out)
    assert 0 < len(written) < 8
    assert read_done(out) == set(written)
    assert run_batch(Engine(2), rows, out, PARAMS, None, console).skipped == len(written)
    assert set(results(out)) == set(range(1, 9))


def test_a_resumed_run_gives_what_an_unbroken_one_gives(llm, prompts, out, console, monkeypatch):
    rows = read_rows(prompts(*({"prompt": text} for text in TEXTS)))
    run_batch(llm, rows, out, PARAMS, None, console)
    whole = results(out)
    out.unlink()
    step, steps = llm.step, iter(range(7))

    def interrupted():
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_batch(llm, rows, out, PARAMS, None, console)
    monkeypatch.undo()
    assert 0 < len(results(out)) < 8
    assert llm.stats().tokens_held == 0
    run_batch(llm, rows, out, PARAMS, None, console)
    assert results(out) == whole


def test_a_line_cut_anywhere_is_written_again_and_the_others_are_not(out, console):
    rows = rows_of("é", "b\n", "ccc")
    run_batch(Engine(1), rows, out, PARAMS, None, console)
    data, whole = out.read_bytes(), results(out)
    last = len(data.split(b"\n")[-2]) + 1
    assert list(whole) == [1, 2, 3]
    for cut in range(1, last + 1):
        for tail in (b"", b"\0" * 9) if cut < last else (b"",):
            out.write_bytes(data[:-cut] + tail)
            assert read_done(out) == {1, 2}
            assert out.read_bytes() == data[:-last]
            out.write_bytes(data[:-cut] + tail)
            engine = Engine(1)
            assert run_batch(engine, rows, out, PARAMS, None, console).skipped == 2
            assert engine.encoded == [("ccc", None)]
            assert out.read_bytes() == data
    out.write_bytes(data[:-last] + b'{"id": 3, no JSON\n')
    assert read_done(out) == {1, 2}


def test_half_a_line_is_taken_back_when_the_disk_is_full(out, console, monkeypatch):
    real = batch.ResultsWriter

    class Full:
        """A file that takes three lines and a half, slowly."""

        def __init__(self, file):
            self.file, self.left = file, 400

        def write(self, data):
            if not self.left:
                raise OSError(28, "No space left on device")
            count = self.file.write(data[: min(50, self.left)])
            self.left -= count
            return count

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(batch, "ResultsWriter", lambda file, out: real(Full(file), out))
    rows = rows_of(*TEXTS)
    with pytest.raises(LeanError, match="No space left on device") as caught:
        run_batch(Engine(1), rows, out, PARAMS, None, console)
    assert str(out) in str(caught.value)
    assert 2 <= len(results(out)) <= 4
    monkeypatch.undo()
    run_batch(Engine(1), rows, out, PARAMS, None, console)
    assert len(results(out)) == 8


def test_an_engine_that_loses_a_request_ends_the_run(out, console):
    engine = Engine()
    engine.step = lambda: engine.requests.clear() or []
    with pytest.raises(EngineError, match="lost 2 requests"):
        run_batch(engine, rows_of("a", "b"), out, PARAMS, None, console)


def test_nothing_to_do_is_said(out, console):
    rows = rows_of("a", "b")
    run_batch(Engine(), rows, out, PARAMS, None, console)
    data = out.read_bytes()
    assert run_batch(None, rows, out, PARAMS, None, console) == BatchSummary(0, 2, 0, 0, 0.0)
    assert f"nothing to do: all 2 rows are in {out}" in console.file.getvalue()
    assert out.read_bytes() == data


# --- the file of results ---

GOOD = b'{"id": 1, "text": "x", "finish_reason": "stop"}\n'
DAMAGE = {
    "somebody's JSON": (b'{"a": 1}', 1, "damaged"),
    "somebody's text": (b"my thesis", 1, "damaged"),
    "prompts": (b'{"prompt": "x"}\n', 1, "not a result"),
    "rows without an answer": (b'{"id": 1, "prompt": "x"}\n', 1, "not a result"),
    "a cut line in the middle": (GOOD + b'{"id": 2, "te\n' + GOOD.replace(b"1", b"3"), 2, "damaged"),
    "zeros in the middle": (GOOD + b"\0\0\n" + GOOD.replace(b"1", b"3"), 2, "damaged"),
    "an empty line": (GOOD + b"\n" + GOOD.replace(b"1", b"3"), 2, "damaged"),
    "text after results": (GOOD + b"notes", 2, "damaged"),
    "not UTF-8": (b'{"id": 1, "text": "\xff"}\n' + GOOD, 1, "damaged"),
    "an id twice": (GOOD + GOOD, 2, "line 1"),
    "an id of no kind": (GOOD.replace(b"1", b"null"), 1, "not a result"),
    "a list": (b"[1]\n", 1, "damaged"),
}


@pytest.mark.parametrize(("data", "line", "word"), DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_is_damaged_or_not_of_lean_is_refused_and_left_alone(out, console, data, line, word):
    out.write_bytes(data)
    message = refusal(read_done, out)
    assert f"{out} line {line}" in message
    assert word in message
    assert refusal(run_batch, None, rows_of("a"), out, PARAMS, None, console) == message
    assert out.read_bytes() == data


def test_places_that_can_be_no_file_of_results_are_refused(tmp_path, prompts, out):
    file = prompts({"prompt": "x"})
    before = file.read_bytes()
    (tmp_path / "soft").symlink_to(file)
    (tmp_path / "hard").hardlink_to(file)
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for place in (file, tmp_path / "." / file.name, tmp_path / "soft", tmp_path / "hard"):
        assert "holds the prompts" in refusal(read_done, place, file)
    assert "is a folder" in refusal(read_done, tmp_path, file)
    assert "make it first" in refusal(read_done, tmp_path / "no" / "out", file)
    assert "make it first" in refusal(read_done, file / "out", file)
    assert "not a regular file" in refusal(read_done, tmp_path / "pipe", file)
    for name in ("a\0b", "x" * 300, "loop"):
        assert "cannot write" in refusal(read_done, tmp_path / name, file)
    assert file.read_bytes() == before
    assert read_done(out, file) == set()
    assert not out.exists()


def test_a_read_only_place_is_refused_before_anything_is_computed(tmp_path, out, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *args: False)
    assert "read-only" in refusal(read_done, out)


def test_two_runs_do_not_write_to_one_file(out, console):
    out.write_bytes(GOOD[:-5])
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another run" in refusal(read_done, out)
        assert "another run" in refusal(run_batch, None, rows_of("a"), out, PARAMS, None, console)
        assert out.read_bytes() == GOOD[:-5]
    assert read_done(out) == set()


# --- progress ---


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
