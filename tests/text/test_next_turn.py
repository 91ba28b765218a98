"""A next turn continues the tokens of a conversation as the template would have written the whole."""

import pytest
from chat_templates import DROPPED, END_OF_TURN, TWICE, UPPER, controls, said, tokenizer_of
from helpers import refusal
from tiny import EOS

from lean.text.prompt import encode_chat, encode_next_turn


@pytest.mark.parametrize("name", END_OF_TURN)
def test_the_next_turn_continues_as_the_whole_conversation_would_be_written(tokenizers, name):
    tokenizer = tokenizers[name]
    messages = said("one", "two", "three", "four", " five<s> ")
    space = " " if name == "mistral" else ""  # that template writes spaces around an answer
    answer = tokenizer(space + "four" + END_OF_TURN[name], add_special_tokens=False)["input_ids"]
    old = encode_chat(tokenizer, messages[:3])
    whole = encode_chat(tokenizer, messages)
    cut_short = encode_next_turn(tokenizer, messages, answer[:-1])
    assert old + answer[:-1] + cut_short == whole
    assert controls(tokenizer, cut_short)[0] == END_OF_TURN[name]
    for generated in (answer, answer[-1:]):
        assert encode_next_turn(tokenizer, messages, generated) == cut_short[len(space) + 1 :]
    if not space:
        assert old + answer + encode_next_turn(tokenizer, messages, answer) == whole


def test_the_next_turn_does_not_depend_on_what_the_answer_says(tokenizers):
    for tokenizer in tokenizers.values():
        plain = encode_next_turn(tokenizer, said("a", "b", "c"), [])
        for answer in ("", "  ", "<think>\n", "</think>", "<|im_end|>", "</s>", "[INST]", "c", "b" * 99):
            assert encode_next_turn(tokenizer, said("a", answer, "c"), []) == plain


def test_only_an_end_of_turn_token_counts_as_written_already(chatml):
    """An answer cut short may end with the very text that comes next."""
    whole = encode_next_turn(chatml, said("a", "b", "c"), [])
    start, other = chatml.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    for last in ([], [start], [EOS], [other, 50], chatml("\n")["input_ids"], chatml("assistant\n")["input_ids"]):
        assert encode_next_turn(chatml, said("a", "b", "c"), last) == whole
    late = tokenizer_of("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}</s>")
    for last in ([EOS], late("\n")["input_ids"]):
        assert late.decode(encode_next_turn(late, said("a", "b", "c"), last)) == "\nuser: c\n</s>"
    bare = tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}</s>")
    assert bare.decode(encode_next_turn(bare, said("a", "b", "</s>"), [EOS])) == "</s></s>"


@pytest.mark.parametrize("template", [DROPPED, UPPER, TWICE], ids=["dropped", "upper", "twice"])
def test_a_template_that_does_not_write_the_last_answer_once_cannot_continue(template):
    tokenizer = tokenizer_of(template)
    assert "cannot continue" in refusal(encode_next_turn, tokenizer, said("a", "b", "c"), [])
    assert encode_chat(tokenizer, said("a"))


def test_a_next_turn_needs_an_answer_and_a_user_message(chatml):
    for messages in (said("a"), said("a", "b"), said("a", "b", roles=("user", "user")), said("a", "b", "c", "d")):
        assert "last two" in refusal(encode_next_turn, chatml, messages, [])
    assert encode_next_turn(chatml, said("a", "b", roles=("assistant", "user")), [])
