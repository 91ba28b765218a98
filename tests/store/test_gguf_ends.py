"""Every token that ends a turn or a text ends a generation."""

import pytest
from gguf_files import write_gguf
from gguf_vocabularies import CONTROL, NORMAL, USER_DEFINED, byte_level, load, sentencepiece
from tiny import byte_tokenizer

from lean import LLM, EngineConfig

ENDS = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"]
ENDS += ["<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>", "<end_of_utterance>", "<turn|>", "[e~["]


def ends(marked, **keys):
    """The texts of the tokens that end a generation."""
    metadata = byte_level(marked, **keys)
    return {metadata["tokenizer.ggml.tokens"][index] for index in load(metadata)[1]}


@pytest.mark.parametrize("text", ENDS)
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_well_known_ends_of_turn_are_ends(text, kind):
    assert ends({"<s>": CONTROL, text: kind, "<|im_start|>": CONTROL}) == {text}


@pytest.mark.parametrize("word", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_the_ends_that_the_file_names_are_ends(word):
    assert ends({"<x>": CONTROL, "<y>": CONTROL}, **{f"{word}_token_id": 257}) == {"<y>"}


def test_all_ends_of_a_file_are_found():
    marked = dict.fromkeys(["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"], 3)
    assert ends(marked, eos_token_id=257) == {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}
    assert ends(dict.fromkeys(["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"], 3)) == {
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    }


def test_the_end_of_a_message_is_no_end_where_a_turn_has_several():
    harmony = dict.fromkeys(["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"], CONTROL)
    assert ends(harmony) == {"<|return|>", "<|call|>", "<|endoftext|>"}
    assert ends(dict.fromkeys(["<|flush|>", "<|calls|>", "<|end|>"], CONTROL)) == {"<|flush|>", "<|calls|>"}
    assert ends(dict.fromkeys(["<|call|>", "<|end|>"], CONTROL)) == {"<|call|>", "<|end|>"}
    assert ends(dict.fromkeys(["</s>", "<|tool_response>"], CONTROL)) == {"<|tool_response>"}
    assert "<|end|>" in ends(harmony, eot_token_id=258)  # the file says so itself


def test_markup_and_ordinary_tokens_are_no_ends():
    assert ends({"</s>": USER_DEFINED, "<eos>": USER_DEFINED, "[PAD]": USER_DEFINED, "<EOT>": NORMAL}) == set()
    assert ends({"</s>": CONTROL, "<eos>": CONTROL}) == {"</s>", "<eos>"}


def test_an_end_whose_type_is_wrong_is_taken_as_a_control_token_and_said(caplog):
    metadata = byte_level({"<|im_end|>": NORMAL})
    tokenizer, found = load(metadata)
    assert found == {256}
    assert tokenizer("a<|im_end|>")["input_ids"] == [97, 256]
    assert "256, <|im_end|>, is taken as a control token" in caplog.text


def test_sentencepieces_end_needs_no_key():
    assert load(sentencepiece({}))[1] == {2}


def test_a_loaded_model_ends_where_its_file_says(tiny, tmp_path):
    keys = {"tokenizer.ggml.eot_token_id": 101, "tokenizer.ggml.eos_token_id": None}
    file = write_gguf(tiny("llama"), tmp_path / "tiny.gguf", keys=keys)
    llm = LLM(str(file), EngineConfig(kv_dtype="bf16"))
    assert llm.model.eos_token_ids == {101, 2}  # 2 is </s>
    assert llm.model.tokenizer("b")["input_ids"] == [byte_tokenizer()("b")["input_ids"][0]]
