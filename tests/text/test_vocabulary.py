"""Single tokens as bytes and text."""

import pytest
from tiny import byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lean.text.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def byte_level():
    return Vocabulary(byte_tokenizer())


def sentence_pieces():
    vocab = {"<unk>": 0, "<0xE2>": 1, "▁the": 2, "é": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))


def test_the_bytes_of_a_text_are_those_of_its_tokens(byte_level):
    text = "a é😀\n\x00<|x|>"
    ids = byte_tokenizer()(text)["input_ids"]
    assert b"".join(map(byte_level.bytes_of, ids)) == text.encode()


def test_a_control_token_is_its_name(byte_level):
    assert byte_level.text_of(2) == "</s>"


def test_a_padding_row_is_empty(byte_level):
    assert byte_level.bytes_of(263) == b""


def test_sentence_pieces_keep_their_space_and_bytes():
    vocabulary = sentence_pieces()
    assert [vocabulary.bytes_of(index) for index in (1, 2, 3)] == [b"\xe2", b" the", "é".encode()]


def test_offsets_count_characters_that_are_complete(byte_level):
    ids = byte_tokenizer()("aé😀b")["input_ids"]
    assert byte_level.offsets(ids, 10) == [10, 11, 11, 12, 12, 12, 12, 13]
