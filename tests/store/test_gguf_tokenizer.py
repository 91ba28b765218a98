"""The tokens of a GGUF file keep their ids, their texts and their roles."""

from functools import cache
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from gguf_vocabularies import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, byte_level, ids_of, load
from gguf_vocabularies import sentencepiece as pieces
from helpers import refusal
from hypothesis import given, settings
from transformers import AutoTokenizer

from lean.text.detokenizer import Detokenizer

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
MARKED = {
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    BEGIN: CONTROL,
    END: CONTROL,
    "<a>": USER_DEFINED,
    "<a>b": USER_DEFINED,
    "<a>b c": CONTROL,
    "   ": USER_DEFINED,
    "\n\n": USER_DEFINED,
    "café": USER_DEFINED,
    "Ġx": USER_DEFINED,
    "工具": CONTROL,
    "[x y]": CONTROL,
    "a:0": CONTROL,
    "<unk>.": UNKNOWN,
}
WORDS = {
    "▁▁": -1.0,
    "▁▁▁▁": -2.0,
    "▁▁▁": -3.0,
    "ab": -4.0,
    "▁a": -5.0,
    "▁ab": -6.0,
    "abab": -7.0,
    "ba": -8.0,
    "bab": -9.0,
}
MAKERS = {"byte-level": byte_level, "sentencepiece": lambda marked: pieces({}, marked, add_space_prefix=False)}


def streamed(tokenizer, ids):
    decoder = Detokenizer(tokenizer)
    return "".join([decoder.add([token]) for token in ids]) + decoder.finish()


def whole(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module", params=MAKERS)
def made(request):
    metadata = MAKERS[request.param](MARKED)
    return metadata["tokenizer.ggml.tokens"], load(metadata)[0]


@pytest.mark.parametrize("text", MARKED)
def test_every_control_and_user_defined_token_is_its_own_id_wherever_it_stands(made, text):
    tokens, tokenizer = made
    want = tokens.index(text)
    for around in ("{}", "x{}y", " {} ", "{0}{0}", "hello {} 12", "é{}é"):
        ids = tokenizer(around.format(text), add_special_tokens=False)["input_ids"]
        assert ids.count(want) == around.count("{")
        assert set(ids) & {tokens.index(other) for other in MARKED} == {want}


def test_no_id_lies_beyond_the_files_tokens(made):
    tokens, tokenizer = made
    assert len(tokenizer) == len(tokens)
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate(tokens)}


def test_control_tokens_are_hidden_and_user_defined_ones_are_text(made):
    _, tokenizer = made
    for text, kind in MARKED.items():
        ids = tokenizer(f"z{text}z", add_special_tokens=False)["input_ids"]
        assert whole(tokenizer, ids) == streamed(tokenizer, ids) == ("zz" if kind != USER_DEFINED else f"z{text}z")


def test_the_roles_are_the_files():
    keys = {"bos_token_id": 258, "eos_token_id": 257, "padding_token_id": 260, "unknown_token_id": 270}
    tokenizer, _ = load(byte_level(MARKED, **keys, add_bos_token=True, add_eos_token=True))
    roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    assert roles == (258, 257, 260, 270)
    assert tokenizer.bos_token == BEGIN
    assert tokenizer("ab")["input_ids"] == [258, 97, 98, 257]
    assert tokenizer("a", "b")["input_ids"] == [258, 97, 257, 258, 98, 257]
    assert load(pieces({}))[0].bos_token_id == 1
    tokenizer, _ = load(byte_level(MARKED))
    assert tokenizer.bos_token_id is tokenizer.eos_token_id is None


@pytest.mark.parametrize(
    ("metadata", "adds"),
    [
        (byte_level({"<s>": 3}, bos_token_id=256), False),
        (byte_level({"<s>": 3}, bos_token_id=256, pre="llama-bpe"), True),
        (byte_level({"<s>": 3}, bos_token_id=256, pre="tekken"), True),
        (byte_level({"<s>": 3}, bos_token_id=256, pre="smaug-bpe"), False),
        (byte_level({"<s>": 3}, bos_token_id=256, pre="llama-bpe", add_bos_token=False), False),
        (byte_level({"<s>": 3}, bos_token_id=256, add_bos_token=True), True),
        (pieces({}), True),
        (pieces({}, add_bos_token=False), False),
    ],
)
def test_a_bos_is_added_where_the_file_says_so_or_where_its_kind_needs_it(metadata, adds):
    tokenizer, _ = load(metadata)
    ids = tokenizer("a")["input_ids"]
    assert (ids[0] == tokenizer.bos_token_id) == adds
    assert ids[-1] != tokenizer.eos_token_id


def test_a_bos_that_the_file_does_not_name_is_refused_or_said(caplog):
    for word in ("bos", "eos"):
        assert f"add_{word}_token is true" in refusal(load, byte_level(**{f"add_{word}_token": True}))
    assert ids_of(byte_level(pre="llama-bpe"), "ab") == [97, 98]
    assert "without a BOS" in caplog.text


DAMAGED = {
    "no tokenizer.ggml.model": byte_level(model=None),
    "'bert' (WordPiece)": byte_level(model="bert"),
    "'t5' (unigram)": byte_level(model="t5"),
    "'rwkv' (RWKV)": byte_level(model="rwkv"),
    "'plamo2' (PLaMo 2)": byte_level(model="plamo2"),
    "'none' (none)": byte_level(model="none"),
    "'GPT2'": byte_level(model="GPT2"),
    "tokenizer.ggml.model is 7": byte_level(model=7),
    "no tokenizer.ggml.tokens": byte_level(tokens=None),
    "has no tokenizer.ggml.tokens": byte_level(tokens=[]),
    "must be an array of texts": byte_level(tokens=["a", 1]),
    "'a' has two ids, 0 and 2": byte_level(tokens=["a", "b", "a"], merges=[], token_type=[1] * 3),
    "token_type has 255 entries for 256": byte_level(token_type=[1] * 255),
    "token_type has 257 entries for 256": byte_level(token_type=[1] * 257),
    "has type 7": byte_level(token_type=[1] * 255 + [7]),
    "scores has 3 entries": byte_level(scores=[0.0] * 3),
    "no tokenizer.ggml.merges": byte_level(words=("ab",), merges=None),
    "merge 0, 'a'": byte_level(merges=["a"]),
    "merge 0, 'a é'": byte_level(merges=["a é"]),
    "merge 0, 'a b'": byte_level(merges=["a b"]),
    "merges holds 3": byte_level(merges=[3]),
    "bos_token_id is 256, but the file has 256 tokens": byte_level(bos_token_id=256),
    "eot_token_id is -1": byte_level(eot_token_id=-1),
    "fim_pre_token_id is 999": byte_level(fim_pre_token_id=999),
    "eos_token_id is '2'": byte_level(eos_token_id="2"),
    "add_bos_token is 1, not true or false": byte_level(add_bos_token=1),
    "tokenizer.chat_template is 5": byte_level() | {"tokenizer.chat_template": 5},
    "no tokenizer.ggml.scores": pieces({}, scores=None),
    "holds NaN": pieces({"ab": float("nan")}),
    "remove_extra_whitespaces is True": pieces({}, remove_extra_whitespaces=True),
    "precompiled_charsmap": pieces({}, precompiled_charsmap=[1, 2]),
    "escape_whitespaces is False": pieces({}, escape_whitespaces=False),
    "treat_whitespace_as_suffix is True": pieces({}, treat_whitespace_as_suffix=True),
    "suppress_tokens": byte_level(suppress_tokens=[7]),
}


@pytest.mark.parametrize("reason", DAMAGED)
def test_what_cannot_be_served_is_refused_by_name(reason):
    message = refusal(load, DAMAGED[reason])
    assert reason in message
    assert message.startswith("tiny.gguf: ")


def test_keys_without_effect_pass_and_unknown_ones_are_said(caplog):
    quiet = byte_level(
        add_sep_token=True,
        seperator_token_id=3,
        token_type_count=2,
        remove_extra_whitespaces=False,
        precompiled_charsmap=[],
        add_space_prefix=False,
        added_tokens=["x"],
    )
    assert ids_of(quiet | {"tokenizer.huggingface.json": "{}", "tokenizer.chat_templates": ["tool"]}, "a  b") == (
        list(b"a  b")
    )
    assert not caplog.messages
    load(byte_level(new_switch=True, other=1) | {"tokenizer.x": 1, "general.y": 2})
    (message,) = caplog.messages
    assert message.endswith("not used: tokenizer.ggml.new_switch, tokenizer.ggml.other, tokenizer.x")


def test_a_vocabulary_of_bytes_needs_no_merges():
    assert ids_of(byte_level({"[PAD256]": UNUSED, "<s>": CONTROL}, merges=None), "ab<s>") == [97, 98, 257]


def test_letters_without_a_token_are_said(caplog):
    load(byte_level(tokens=["a", "b"], token_type=[1, 1], merges=[]))
    assert "no token for" in caplog.text


# --- SentencePiece ---


def reference(words, text):
    """SentencePiece's own rule: of all neighbours that make a token, join those with the highest score, the leftmost
    first."""
    symbols = list(text.replace(" ", "▁"))
    while True:
        joined = [(-words[a + b], at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in words]
        if not joined:
            return symbols
        _, at = min(joined)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]


@cache
def words_tokenizer():
    return load(pieces(WORDS, add_space_prefix=False, add_bos_token=False))[0]


@settings(max_examples=300)
@given(st.text(" ab", max_size=14))
def test_neighbours_are_joined_by_score_as_sentencepiece_does(text):
    tokenizer = words_tokenizer()
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == reference(WORDS, text)


def test_a_space_goes_before_the_text_unless_the_file_says_no():
    tokens = pieces(WORDS)["tokenizer.ggml.tokens"]

    def words(text, **keys):
        return [tokens[index] for index in ids_of(pieces(WORDS, add_bos_token=False, **keys), text)]

    assert words("ab") == words("ab", add_space_prefix=True) == ["▁ab"]
    assert words("ab", add_space_prefix=False) == ["ab"]
    assert words(" ab") == ["▁▁", "ab"]
    assert words("a</s>ab") == ["▁a", "</s>", "▁ab"]  # as llama.cpp does after every control token
    assert words("") == []


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", ["ab ab", " x", "é삼😀 ab", "a\n\tb\r\n", "<0x41>", "  ", "x   ab  ", "\x00"])
def test_bytes_spaces_and_newlines_come_back(prefix, text):
    tokenizer, _ = load(pieces(WORDS, add_space_prefix=prefix))
    ids = tokenizer(text)["input_ids"]
    assert whole(tokenizer, ids) == streamed(tokenizer, ids) == text


def test_characters_without_a_token_become_bytes_or_the_unknown_token():
    assert ids_of(pieces({}, add_bos_token=False, add_space_prefix=False), "é") == [3 + 0xC3, 3 + 0xA9]
    few = pieces({}, add_bos_token=False, add_space_prefix=False)
    for byte in range(256):
        few["tokenizer.ggml.tokens"][3 + byte] = f"[{byte}]"
    assert ids_of(few, "aéb") == [few["tokenizer.ggml.tokens"].index("a"), 0, few["tokenizer.ggml.tokens"].index("b")]


def test_control_unknown_and_byte_tokens_are_never_spelled_by_merges():
    words = {"<s": -1.0, "s>": -1.0, "<0": -1.0, "x41>": -1.0}
    metadata = pieces(words, add_bos_token=False, add_space_prefix=False)
    assert not {0, 1, 2, *range(3, 259)} & set(ids_of(metadata, "<0x41> < s> <s <unk"))
    assert ids_of(metadata, "<s>") == [1]


def test_unused_tokens_are_ordinary_ones_as_in_llama_cpp():
    metadata = pieces({"ab": -1.0}, add_bos_token=False, add_space_prefix=False)
    index = metadata["tokenizer.ggml.tokens"].index("ab")
    metadata["tokenizer.ggml.token_type"][index] = UNUSED
    assert ids_of(metadata, "ab") == [index]


def test_phi_3s_control_tokens_take_the_white_space_after_them():
    phi = {"general.architecture": "phi3", "general.name": "Phi 3.5 Mini Instruct"}
    metadata = pieces({}, {"<|user|>": CONTROL, "<|endoftext|>": CONTROL}, add_bos_token=False)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[index] for index in ids_of(metadata | phi, "<|user|>\n a")] == ["<|user|>", "▁", "a"]
    assert len(ids_of(metadata | phi, "<|endoftext|>\n a")) > 3
    assert len(ids_of(metadata, "<|user|>\n a")) > 3


def test_gemma_4_has_merges_spaces_and_bytes():
    metadata = pieces({"▁a": 0.0, "\n": 0.0}, {"<eos>": CONTROL}, model="gemma4", merges=["▁ a"], bos_token_id=1)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[index] for index in ids_of(metadata, "a a\né<eos>")] == (
        ["<s>", "a", "▁a", "\n", "<0xC3>", "<0xA9>", "<eos>"]
    )


# --- templates and files ---


def test_the_default_chat_template_is_used_and_others_are_not(caplog):
    named = {"tokenizer.chat_template.tool_use": "{{ 2 }}", "tokenizer.chat_templates": ["tool_use"]}
    assert load(byte_level() | {"tokenizer.chat_template": "{{ 1 }}"} | named)[0].chat_template == "{{ 1 }}"
    assert load(byte_level())[0].chat_template is None
    assert not caplog.messages
    assert load(byte_level() | named)[0].chat_template is None
    assert "tokenizer.chat_template.tool_use: none is used" in caplog.text


@pytest.mark.parametrize(
    "metadata",
    [
        byte_level(MARKED, ("hello", " world"), bos_token_id=258, eos_token_id=257, pre="llama-bpe"),
        byte_level(MARKED, pre="qwen2", eos_token_id=257, add_eos_token=True),
        pieces(WORDS, MARKED, eos_token_id=2),
        pieces(WORDS, MARKED, add_space_prefix=False, add_bos_token=False),
    ],
)
def test_a_saved_tokenizer_is_read_back_with_the_same_ids(metadata, tmp_path):
    tokenizer, _ = load(metadata | {"tokenizer.chat_template": "{{ messages[0].content }}"})
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = " hello world\n\n12 é café   <a>b c<|im_end|>工具" + BEGIN
    ids = tokenizer(text)["input_ids"]
    assert again(text)["input_ids"] == ids
    assert whole(again, ids) == whole(tokenizer, ids)
    assert (again.bos_token_id, again.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert again.chat_template == tokenizer.chat_template


def test_an_empty_token_gets_a_name_of_its_own():
    metadata = byte_level({"": NORMAL, "x y": USER_DEFINED})
    assert load(metadata)[0].convert_ids_to_tokens(256) == "[EMPTY_256]"
    assert ids_of(metadata, "x y") == [257]


@pytest.mark.parametrize("word", ["bos", "eos", "padding", "unknown"])
@pytest.mark.parametrize(
    ("metadata", "token"),
    [(byte_level(words=("ab",)), "!"), (byte_level(words=("ab",)), "ab"), (pieces(WORDS), "!"), (pieces(WORDS), "▁ab")],
)
def test_ordinary_text_stays_text_whatever_role_the_file_gives_it(word, metadata, token, caplog):
    index = metadata["tokenizer.ggml.tokens"].index(token)
    keys = {f"tokenizer.ggml.{word}_token_id": index, "tokenizer.ggml.add_bos_token": False}
    tokenizer, ends = load(metadata | keys)
    text = "x ab! ab ab!"
    ids = tokenizer(text)["input_ids"]
    assert ids == ids_of(metadata | {"tokenizer.ggml.add_bos_token": False}, text)
    assert whole(tokenizer, ids) == streamed(tokenizer, ids) == text
    assert (index in ends) == (word == "eos")
    assert "is part of ordinary text" in caplog.text


def test_a_token_with_a_role_is_a_control_token_whatever_its_type():
    metadata = byte_level({"<s>": NORMAL, "</s>": USER_DEFINED}, bos_token_id=256, eos_token_id=257)
    tokenizer, _ = load(metadata)
    assert tokenizer("<s>a</s>")["input_ids"] == [256, 97, 257]
    assert whole(tokenizer, [256, 97, 257]) == "a"
    assert BYTE not in metadata["tokenizer.ggml.token_type"]
