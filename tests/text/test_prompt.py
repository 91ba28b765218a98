"""Which ids a prompt and a conversation become, and what is refused."""

import pytest
from chat_templates import ROLES, TEMPLATES, controls, said, tokenizer_of, unprotected
from helpers import refusal
from tiny import BOS, byte_tokenizer
from tokenizers.processors import TemplateProcessing

from lean.text.prompt import encode_chat, encode_next_turn, encode_prompt

ORDINARY = ("  two\n\n\n\nparagraphs ▁▁ ", "<|im_", "k>", "x | y <> [INST [/ é😀", "<s >", "0" * 40)


def test_other_text_becomes_the_ids_that_the_tokenizer_gives_it(tokenizers, name):
    tokenizer, roles = tokenizers[name], ROLES[name]
    for content in ("hi", "", " ", "\n", *ORDINARY):
        messages = said(*[content] * len(roles), roles=roles)
        assert encode_chat(tokenizer, messages) == unprotected(tokenizer, messages)


def test_white_space_tokens_are_vocabulary_even_beside_a_control_token(chatml):
    """Gemma's newlines and GPT-NeoX's indents are added tokens, and neither special nor control tokens."""
    ids = encode_prompt(chatml, "a\n\nb<|im_end|>c\n\nd")
    assert ids.count(chatml.convert_tokens_to_ids("\n\n")) == 2


def test_a_raw_prompt_is_not_protected(chatml):
    """In raw mode the text may spell control tokens."""
    text = "<s><|im_start|>user\n<|im_end|>"
    assert controls(chatml, encode_prompt(chatml, text, chat=False)) == ["<s>", "<|im_start|>", "<|im_end|>"]
    assert controls(byte_tokenizer(), encode_prompt(byte_tokenizer(), text)) == ["<s>"]


def test_a_prompt_in_a_chat_is_one_message_of_the_user(chatml):
    for text in ("hi", " ", "\n\n", "<|im_end|>"):
        assert encode_prompt(chatml, text) == encode_prompt(chatml, text, chat=True) == encode_chat(chatml, said(text))


def test_the_template_writes_the_only_bos():
    """Here the tokenizer itself adds one to every text."""
    tokenizer = tokenizer_of(*TEMPLATES["llama3"])
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    assert tokenizer("x")["input_ids"][0] == BOS
    for content in ("hi", "<s>hi", "<|eot|><s>"):
        ids = encode_chat(tokenizer, said(content, content, content))
        assert [index for index, token in enumerate(ids) if token == BOS] == [0]
        assert BOS not in encode_next_turn(tokenizer, said("x", content, content), [])


def test_a_conversation_without_a_template_is_refused_with_what_to_do():
    for call in (encode_chat, lambda *a: encode_next_turn(*a, []), lambda t, m: encode_prompt(t, "x", chat=True)):
        message = refusal(call, byte_tokenizer(), said("a", "b", "c"))
        assert message == "the model has no chat template: use --no-chat to complete the text as it is"


def test_what_the_template_raises_becomes_one_line(tokenizers):
    messages = said("be kind", "hi", roles=("system", "user"))
    assert "no system role" in refusal(encode_chat, tokenizers["gemma"], messages)
    assert "cannot render" in refusal(encode_chat, tokenizer_of("{{ messages[5].content.x }}"), messages)
    assert "cannot render" in refusal(encode_chat, tokenizer_of("{% for %}"), messages)


@pytest.mark.parametrize(
    ("messages", "where", "what"),
    [
        ("hi", "", "list of messages, not str"),
        ({"role": "user", "content": "hi"}, "", "not dict"),
        (None, "", "not NoneType"),
        ([], "", "empty"),
        (["hi"], "messages[0]", "not str"),
        ([*said("a"), None], "messages[1]", "not NoneType"),
        ([*said("a"), {"content": "b"}], "messages[1]", "no role"),
        ([*said("a"), {"role": "user"}], "messages[1]", "no content"),
        ([*said("a"), {"role": "critic", "content": "b"}], "messages[1]", "'critic'"),
        ([*said("a"), {"role": ["x\ny" * 99], "content": "b"}], "messages[1]", "..."),
        ([{"role": None, "content": "b"}], "messages[0]", "None"),
        ([*said("a", "b"), {"role": "user", "content": None}], "messages[2]", "not NoneType"),
        ([{"role": "user", "content": [{"type": "text", "text": "b"}]}], "messages[0]", "not list"),
        ([{"role": "user", "content": b"b"}], "messages[0]", "not bytes"),
        ([{"role": "user", "content": "a\udc80"}], "messages[0]", "UTF-8"),
    ],
)
def test_a_message_of_the_wrong_shape_is_named(chatml, messages, where, what):
    for call in (encode_chat, lambda *arguments: encode_next_turn(*arguments, [])):
        message = refusal(call, chatml, messages)
        assert message.startswith(where)
        assert what in message
        assert len(message) < 200


def test_the_messages_of_the_caller_stay_as_they_are(chatml):
    messages = said("<|im_end|>", "b", "<|im_end|>")
    encode_chat(chatml, messages)
    encode_next_turn(chatml, messages, [])
    assert messages == said("<|im_end|>", "b", "<|im_end|>")
