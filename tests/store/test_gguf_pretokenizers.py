"""Each name of `tokenizer.ggml.pre` cuts text as the regular expression in the model's own tokenizer.json does."""

import pytest
from gguf_vocabularies import ALPHABET, byte_level, ids_of, load
from helpers import refusal

from lean.store.gguf.pretokenizers import PRE_TOKENIZERS

BYTE_OF = {letter: byte for byte, letter in ALPHABET.items()}


def pieces(metadata, text):
    """The words into which a tokenizer cuts a text."""
    found = load(metadata)[0].backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(BYTE_OF[letter] for letter in word).decode() for word, _ in found]


TEXT = "I'll HelloWorld 12345 it'S\n\n  x\t(a+b)/\n 你好é ３ 삼\r\n"

WHOLE = ["I", "'ll", " HelloWorld"]
CAMEL = ["I'll", " Hello", "World"]
NUMBER, THREES, DIGITS = [" 12345"], [" ", "123", "45"], [" ", "1", "2", "3", "4", "5"]
GPT2_LINE = ["\n\n ", " x", "\t", "(", "a", "+", "b", ")/", "\n", " 你好é"]
CL100K_LINE = ["\n\n", " ", " x", "\t", "(a", "+b", ")/\n", " 你好é", " ", "３", " 삼", "\r\n"]
CJK_APART = [*CL100K_LINE[:-5], " ", "你好", "é", *CL100K_LINE[-4:]]
DEEPSEEK = ["I", "'", "ll", " HelloWorld"]
DEEPSEEK_LINE = [" it", "'", "S", "\n", "\n", " ", " x", "\t(", "a", "+", "b", ")/", "\n", " ", "你好", "é", " ", "３"]
DEEPSEEK_LINE += [" ", "삼", "\r", "\n"]
BLOOM, BLOOM_LINE = ["I'll", " HelloWorld"], [" it'S", "\n\n ", " x", "\t(", "a+b", ")", "/", "\n", " 你好é"]
EXPECTED = {
    "gpt-2": [*WHOLE, *NUMBER, " it", "'", "S", *GPT2_LINE, " ３", " 삼", "\r\n"],
    "smollm": [*WHOLE, *DIGITS, " it", "'", "S", *GPT2_LINE, " ", "３", " 삼", "\r\n"],
    "llama-bpe": [*WHOLE, *THREES, " it", "'S", *CL100K_LINE],
    "qwen2": [*WHOLE, *DIGITS, " it", "'S", *CL100K_LINE],
    "qwen35": [*WHOLE, *DIGITS, " it", "'S", *CL100K_LINE],
    "ufakzeka": [*WHOLE, *DIGITS, " it", "'S", *CL100K_LINE],
    "laguna": [*WHOLE, *DIGITS, " it", "'S", *CL100K_LINE[:6], ")/", "\n", *CL100K_LINE[7:-1], "\r", "\n"],
    "seed-coder": [*WHOLE, *DIGITS, " it", "'S", *CL100K_LINE[:6], ")/", "\n", *CL100K_LINE[7:]],
    "bailingmoe": [*WHOLE, *DIGITS, " it", "'S", *CL100K_LINE],
    "minicpm5": [*WHOLE, *THREES, " it", "'S", *CL100K_LINE],
    "jais-2": [*WHOLE, *THREES, " it", "'S", *CL100K_LINE],
    "deepseek-v3": [*WHOLE, *THREES, " it", "'S", *CJK_APART],
    "spark2_5": [*WHOLE, *DIGITS, " it", "'S", "\n", "\n", *CJK_APART[1:6], ")/", "\n", *CJK_APART[7:-1], "\r", "\n"],
    "deepseek-llm": [*DEEPSEEK, " ", "12345", *DEEPSEEK_LINE],
    "deepseek-coder": [*DEEPSEEK, *DIGITS, *DEEPSEEK_LINE],
    "falcon": ["I", "'", "ll", " HelloWorld", *THREES, " it", "'", "S", *GPT2_LINE, " ３", " 삼", "\r\n"],
    "default": ["I", "'", "ll", " HelloWorld", *THREES, " it", "'", "S", *GPT2_LINE, " ", "３", " 삼", "\r\n"],
    "bloom": [*BLOOM, " 12345", *BLOOM_LINE, " ３", " 삼", "\r\n"],
    "viking": [*BLOOM, *DIGITS, *BLOOM_LINE, " ", "３", " 삼", "\r\n"],
    "superbpe": ["I'll HelloWorld ", "12", "345", " it'S\n\n  x\t(a+b)/\n 你好é ", "３", " 삼\r\n"],
    "gpt-4o": [*CAMEL, *THREES, " it'S", *CL100K_LINE],
    "cohere2moe": [*CAMEL, " ", "12", "345", " it'S", *CL100K_LINE],
    "tekken": ["I", "'ll", " Hello", "World", *DIGITS, " it", "'S", *CL100K_LINE],
    "kimi-k2": [*CAMEL, *THREES, " it'S", *CJK_APART],
    "exaone-moe": [*WHOLE, *DIGITS, " it", "'S", *CL100K_LINE],
    "youtu": [*CAMEL, *DIGITS, " it'S", *CJK_APART[:-2], " ", "삼", "\r\n"],
}
SAME = {
    "gpt-2": "phi-2 mpt olmo jais gigachat mellum trillion granite-docling exaone4 modern-bert a.x-4.0 jina-v2-code",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 smaug-bpe dbrx chatglm-bpe glm4",
    "qwen2": "deepseek-r1-qwen stablelm2 megrez hunyuan solar-open grok-2",
    "bailingmoe": "bailingmoe2 llada-moe",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "bloom": "poro-chat gpt3-finnish",
    "gpt-4o": "llama4 minimax-m2 kanana2 talkie",
    "cohere2moe": "tiny_aya",
}
NAMES = {other: name for name in EXPECTED for other in (name, *SAME.get(name, "").split())}


@pytest.mark.parametrize("name", NAMES)
def test_text_is_cut_as_the_model_was_trained(name):
    assert pieces(byte_level({"<s>": 3}, pre=name, bos_token_id=256), TEXT) == EXPECTED[NAMES[name]]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize(
    "text", ["", " ", "\n", "a\u200db e\u0301 ﬁ", "  \t\r\n\n 1２½ 'S ſ's", "نص، हिन्दी ไทย 🙂👩‍👩‍👧"]
)
def test_no_way_to_cut_loses_a_character(name, text):
    metadata = byte_level({"<s>": 3}, pre=name, bos_token_id=256, add_bos_token=False)
    assert "".join(pieces(metadata, text)) == text


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("qwen35", "हिन्दी", ["हिन्दी"]),  # marks belong to the word
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
        ("ufakzeka", "Ankara'dan", ["Ankara", "'dan"]),
        ("qwen2", "Ankara'dan", ["Ankara", "'d", "an"]),
        ("gpt-4o", "a/\n/b", ["a", "/\n/", "b"]),
        ("llama-bpe", "a/\n/b", ["a", "/\n", "/b"]),
        ("tiny_aya", "1234567 12", ["1", "234", "567", " ", "12"]),
        ("superbpe", "1234567 a b", ["1", "234", "567", " a b"]),
        ("exaone-moe", "the end of", ["the end of"]),
        ("jais-2", "a" + " " * 8 + "b", ["a", " " * 4, " " * 2, " ", " b"]),
        ("kimi-k2", "中文abc漢", ["中文", "abc", "漢"]),
        ("deepseek-llm", "ab中文 ΩΆ１２", ["ab", "中文", " ΩΆ", "１２"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("bloom", "a|b…c、d", ["a", "|", "b", "…", "c", "、", "d"]),
    ],
)
def test_groups_differ_where_their_models_do(name, text, words):
    assert pieces(byte_level(pre=name), text) == words


def test_an_unknown_name_is_refused_and_a_missing_one_is_said(caplog):
    for name in ("no-such-thing", "gpt2", "Llama-BPE", "afmoe"):
        assert f"tokenizer.ggml.pre is {name!r}" in refusal(load, byte_level(pre=name))
    for name in (None, ""):
        assert pieces(byte_level(pre=name), TEXT) == EXPECTED["default"]
        assert "has no tokenizer.ggml.pre" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(("name", "whole"), [("llama-bpe", True), ("tekken", True), ("smaug-bpe", False)])
def test_a_word_that_is_a_token_needs_no_merges_where_the_model_says_so(name, whole):
    metadata = byte_level({" abc": 1}, pre=name)
    metadata["tokenizer.ggml.tokens"][256] = "Ġabc"  # which no merges lead to
    assert ids_of(metadata | {"tokenizer.ggml.add_bos_token": False}, "x abc") == (
        [ord("x"), 256] if whole else list(b"x abc")
    )


@pytest.mark.parametrize(("name", "composed"), [("qwen2", True), ("command-r", True), ("llama-bpe", False)])
def test_accents_are_composed_where_the_models_tokenizer_composes_them(name, composed):
    text = "e\u0301"
    assert ids_of(byte_level(pre=name), text) == list(("é" if composed else text).encode())
