"""Prompts of the needle test: exact length, a needle at its depth, and equal prompts from equal seeds."""

import os
import re
import subprocess
import sys

import pytest
from helpers import refusal
from needles import ASKED, TEXT, TOKENIZERS, Searcher, digest, make_tokenizer, run, share
from tiny import byte_tokenizer
from tokenizers import Regex, normalizers


@pytest.fixture(scope="module", params=[(name, chat) for name in TOKENIZERS for chat in (False, True)], ids=str)
def tokenizer(request):
    return make_tokenizer(*request.param)


INDENTED = "\n\n".join(
    f"{' ' * (n * 7 % 61)}Ship {n} went to sea.{' ' * (n * 5 % 37)}It came back." for n in range(400)
)
NEWLINES = "".join(f"Ship {n} went to sea{'.' * (n % 2)}" + "\n" * (n * 11 % 43 + 1) for n in range(400))


@pytest.mark.parametrize("length", [450, 777, 3000])
@pytest.mark.parametrize("text", [TEXT, INDENTED, NEWLINES], ids=["docs", "indented", "newlines"])
def test_prompts_have_the_length_asked_for_template_and_question_included(tokenizer, text, length):
    engine = Searcher(tokenizer)
    run(engine, (length,), (0, 33, 100), text=text)
    assert len(engine.prompts) == 12
    short = 4 if "merges" in tokenizer.name_or_path else 1  # a character more at the beginning changes the merges there
    for ids in engine.prompts:
        assert length - short <= len(ids) <= length


def test_a_text_of_which_a_tokenizer_makes_no_tokens_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("[字\n]"), "")
    assert "too few tokens" in refusal(run, Searcher(tokenizer), text="字" * 9)


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
from needles import Searcher, digest, run
from tiny import byte_tokenizer
engine = Searcher(byte_tokenizer())
run(engine, (500, 900), (0, 50), seed=3)
print(digest(engine))
"""


def test_every_process_asks_the_same():
    engine = Searcher(byte_tokenizer())
    run(engine, (500, 900), (0, 50), seed=3)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path}
    command = [sys.executable, "-c", PROMPTS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == digest(engine)
