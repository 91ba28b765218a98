"""The needle test asks what it says: prompts of exact length, a needle at its depth, and answers judged by the value.

Random weights find nothing, so the harness is tried with a stand-in for an engine that answers by searching the tokens
of the prompt, all of them or the last few.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import refusal
from tiny import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lean import LLM, EngineConfig
from lean.engine.request import RequestOutput
from lean.errors import EngineError, LeanError
from lean.eval.corpus import python_docs
from lean.eval.score.needle import (
    ANSWER_TOKENS,
    ITEMS,
    Needle,
    NeedleCell,
    draw_map,
    needle_report,
    print_map,
    run_needle,
)

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{{ '<|im_start|>assistant
' }}"""
TEXT = python_docs()
ASKED = re.compile(r"The access code for the (\w+ \w+) is$")


def merging_tokenizer():
    """Several characters a token, as real models have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT[:60_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"bytes": byte_tokenizer, "merges": merging_tokenizer}


@pytest.fixture(scope="module", params=[(name, chat) for name in TOKENIZERS for chat in (False, True)], ids=str)
def tokenizer(request):
    name, chat = request.param
    tokenizer = TOKENIZERS[name]()
    tokenizer.name_or_path = name
    if chat:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
    return tokenizer


class Searcher:
    """In an engine's place: searches the last ``sees`` tokens of a prompt for the words that it ends with."""

    def __init__(self, tokenizer, sees=None, max_model_len=100_000):
        self.model = SimpleNamespace(tokenizer=tokenizer)
        self.size = SimpleNamespace(max_model_len=max_model_len)
        self.sees = sees
        self.prompts = []  # token ids, in order
        self.together = []  # how many each call had

    def texts(self):
        return [self.model.tokenizer.decode(ids) for ids in self.prompts]

    def generate(self, prompts, params):
        assert params.temperature == 0
        assert params.repetition_penalty == 1
        self.prompts += prompts
        self.together.append(len(prompts))
        return [self.answer(ids) for ids in prompts]

    def answer(self, ids):
        text = self.model.tokenizer.decode(ids[-self.sees :] if self.sees else ids)
        found = re.search(rf"{ASKED.search(text)[0]} (\d+)\.", text)
        return RequestOutput(0, f" {found[1]}." if found else " not known", [], len(ids), "length")


def run(engine, lengths=(700,), depths=(50,), text=TEXT, **options):
    return list(run_needle(engine, text, lengths, depths, **options))


def share(cells):
    return [cell.accuracy for cell in cells]


# --- prompts ---


@pytest.mark.parametrize("length", [450, 777, 3000])
def test_prompts_have_the_length_asked_for_template_and_question_included(tokenizer, length):
    engine = Searcher(tokenizer)
    run(engine, (length,), (0, 33, 100))
    assert len(engine.prompts) == 12
    short = 4 if "merges" in tokenizer.name_or_path else 12  # an indentation beside the needle is a token or many
    for ids in engine.prompts:
        assert length - short <= len(ids) <= length


def test_a_text_that_is_too_short_is_repeated(tokenizer):
    engine = Searcher(tokenizer)
    assert share(run(engine, (2000,), (0, 100), text="The sea was calm. Nobody spoke.")) == [1, 1]
    assert all(1996 <= len(ids) <= 2000 for ids in engine.prompts)


def test_the_template_is_used_where_there_is_one_and_the_answer_is_begun_either_way(tokenizer):
    engine = Searcher(tokenizer)
    run(engine)
    for text in engine.texts():
        assert ASKED.search(text)
        assert ("<|im_start|>assistant\nThe access code" in text) == bool(tokenizer.chat_template)
    plain = Searcher(tokenizer)
    run(plain, chat=False)
    assert not any("<|im_start|>" in text for text in plain.texts())


def test_chat_without_a_template_is_refused():
    assert "chat template" in refusal(run, Searcher(byte_tokenizer()), chat=True)


@pytest.mark.parametrize("depth", [0, 10, 25, 50, 75, 90, 100])
def test_the_needle_is_at_its_depth_between_two_sentences(depth):
    engine = Searcher(byte_tokenizer())
    run(engine, (6000,), (depth,), trials=8, text=" ".join(f"Ship {n} went to sea." for n in range(1000)))
    for text in engine.texts():
        before, after = re.split(r"(?:^|\n\n)The access code for .* has the access code \d{5}\.\n\n", text)
        after = after[: after.rindex("What is the access code")]
        assert abs(len(before) / (len(before) + len(after)) - depth / 100) < 0.01
        assert before == "" if depth == 0 else before.endswith("sea.")
        assert after == "" if depth == 100 else depth == 0 or after.startswith("Ship")


def test_the_text_around_a_needle_is_the_text_as_it_is():
    engine = Searcher(byte_tokenizer())
    run(engine, (3000,), (50,), trials=2)
    for text in engine.texts():
        before, after = re.split(r"The access code for .* has the access code \d{5}\.", text)
        assert before.strip() in TEXT + "\n\n" + TEXT
        assert after[: after.rindex("What is")].strip() in TEXT + "\n\n" + TEXT


def test_a_text_without_sentences_takes_the_needle_exactly_at_its_depth():
    engine = Searcher(byte_tokenizer())
    assert share(run(engine, (3000,), (50,), text="word " * 5000)) == [1]
    for text in engine.texts():
        before, after = re.split(r"The access code for .* has the access code \d{5}\.", text)
        assert abs(len(before) - len(after[: after.rindex("What is")])) < 10


def test_every_trial_of_a_cell_has_its_own_item_value_and_text():
    engine = Searcher(byte_tokenizer())
    run(engine, (900,), (0, 100), trials=20)
    for texts in (engine.texts()[:20], engine.texts()[20:]):
        assert len({ASKED.search(text)[1] for text in texts}) == 20
        assert len({re.search(r"is (\d{5})\.", text)[1] for text in texts}) == 20
        assert len({text.replace("\n", " ")[400:600] for text in texts}) == 20


def test_a_value_is_no_number_of_the_text():
    only = "77777"
    numbers = " ".join(str(n) for n in range(10_000, 100_000) if str(n) != only)
    engine = Searcher(byte_tokenizer())
    run(engine, text=numbers)
    assert all(f"is {only}. Remember" in text for text in engine.texts())
    assert "every number" in refusal(run, engine, text=f"{numbers} {only}")


def test_more_trials_and_other_cells_leave_the_prompts_of_a_cell_as_they_are():
    few, many = Searcher(byte_tokenizer()), Searcher(byte_tokenizer())
    run(few, (700,), (50,), trials=2)
    run(many, (600, 700), (0, 50), trials=3)
    assert few.prompts == many.prompts[9:11]


def test_another_seed_is_another_test():
    one, two = Searcher(byte_tokenizer()), Searcher(byte_tokenizer())
    run(one, seed=1)
    run(two, seed=2)
    assert not {*one.texts()} & {*two.texts()}


PROMPTS = """
import sys
sys.path.insert(0, {folder!r})
from test_needle import Searcher, byte_tokenizer, digest, run
engine = Searcher(byte_tokenizer())
run(engine, (500, 900), (0, 50), seed=3)
print(digest(engine))
"""


def digest(engine):
    return hashlib.sha256(json.dumps(engine.prompts).encode()).hexdigest()


def test_every_process_asks_the_same():
    engine = Searcher(byte_tokenizer())
    run(engine, (500, 900), (0, 50), seed=3)
    code = PROMPTS.format(folder=os.path.dirname(__file__))
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == digest(engine)


# --- what is found ---


def test_who_sees_the_whole_prompt_finds_every_needle(tokenizer):
    engine = Searcher(tokenizer)
    cells = run(engine, (500, 1200), (0, 50, 100), trials=3)
    assert [(cell.length, cell.depth) for cell in cells] == [(n, d) for n in (500, 1200) for d in (0, 50, 100)]
    assert share(cells) == [1] * 6
    assert engine.together == [3] * 6


def test_who_sees_only_the_last_tokens_finds_only_needles_among_them():
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


def test_progress_is_told_after_every_cell():
    told = []
    run(Searcher(byte_tokenizer()), (500, 600), (0, 50), trials=3, progress=told.append)
    assert told == [3, 3, 3, 3]


def test_cells_come_as_they_are_done():
    engine = Searcher(byte_tokenizer())
    cells = run_needle(engine, TEXT, (500, 600), (0, 50), trials=1)
    assert engine.together == []
    next(cells)
    assert engine.together == [1]


def test_a_request_that_failed_is_no_lost_needle(monkeypatch):
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


def test_what_cannot_be_served_is_refused_before_anything_runs(tiny):
    llm = LLM(str(tiny("llama")), EngineConfig(max_num_seqs=1))
    limit = llm.size.max_model_len - ANSWER_TOKENS
    message = refusal(run_needle, llm, TEXT, (400, limit + 1), (0,))
    assert str(limit + 1) in message
    assert f"at most {limit}," in message
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
def test_what_has_no_meaning_is_refused_before_anything_runs(options, words):
    engine = Searcher(byte_tokenizer())
    arguments = {"text": TEXT, "lengths": (500,), "depths": (50,), **options}
    assert words in refusal(run_needle, engine, **arguments)
    assert engine.together == []


# --- reports ---


CELLS = [NeedleCell(512, 0, 4, 4), NeedleCell(512, 50, 3, 4), NeedleCell(2048, 0, 0, 4)]


def test_the_error_is_wilsons_and_never_zero():
    assert NeedleCell(1, 0, 4, 4).stderr == pytest.approx(0.1)  # his interval is 0.8 .. 1
    assert NeedleCell(1, 0, 0, 4).stderr == pytest.approx(0.1)
    assert NeedleCell(1, 0, 5000, 10_000).stderr == pytest.approx(0.005, rel=1e-3)  # as the plain one


def test_a_report_has_every_cell_and_their_sum_for_json():
    report = json.loads(json.dumps(needle_report(iter(CELLS)), allow_nan=False))
    assert report.keys() == {"accuracy", "stderr", "correct", "trials", "cells"}
    assert (report["correct"], report["trials"], report["accuracy"]) == (7, 12, pytest.approx(7 / 12))
    assert len(report["cells"]) == 3
    assert report["cells"][1] == {
        "length": 512,
        "depth": 50,
        "correct": 3,
        "trials": 4,
        "accuracy": 0.75,
        "stderr": CELLS[1].stderr,
    }


def test_the_table_has_a_row_for_every_depth_and_a_column_for_every_length(capsys):
    print_map(CELLS, "int8")
    lines = [re.findall(r"[\w,/%]+", line) for line in capsys.readouterr().out.splitlines()]
    assert ["int8"] in lines
    assert ["depth", "512", "2,048"] in lines
    assert ["0%", "4/4", "0/4"] in lines
    assert ["50%", "3/4"] in lines


def test_the_map_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "needle.png"
    draw_map(CELLS, str(file), "int8")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LeanError, match=r"lean-inference\[eval\]"):
        draw_map(CELLS, str(tmp_path / "needle.png"), "int8")


# --- a real model ---


@pytest.mark.slow
def test_the_demo_model_finds_what_its_cache_shows_and_loses_what_a_window_hides():
    from lean.store.pull import pull

    torch.set_num_threads(2)
    exact = LLM(str(pull("smollm2-135m")), EngineConfig(kv_dtype="auto"))
    assert sum(cell.correct for cell in run(exact, (1024,), (0, 50, 100), trials=3)) >= 8
    windowed = LLM(exact.model, EngineConfig(kv_dtype="auto", window=256))
    lost, lost_too, kept = run(windowed, (1024,), (0, 50, 100), trials=3)
    assert lost.correct == lost_too.correct == 0
    assert kept.correct >= 2
