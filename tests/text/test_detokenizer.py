"""Text comes out piece by piece: whole characters only, nothing taken back, and in the end what one decode gives."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from tiny import BOS, EOS, byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lean.text.detokenizer import REPLACEMENT, Detokenizer

TEXT = "é😀삼겹살 a"
WORDS = ("▁", "▁▁", "▁a", "a", "▁b", "b", "▁the", "▁é", "삼", ".", "\n")


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Words that carry their leading space, everything else as <0x..> bytes; a decode drops the text's first space."""
    special = ("<unk>", "<s>", "</s>")
    names = (*special, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS)
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


BYTES, METASPACE = byte_tokenizer(), metaspace_tokenizer()


def byte_ids(data: bytes) -> list[int]:
    return BYTES.convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in data])


def words(*names: str) -> list[int]:
    """Ids of tokens by name; text in other characters becomes its bytes."""
    ids = []
    for name in names:
        bytewise = [f"<0x{byte:02X}>" for byte in name.encode()]
        ids += METASPACE.convert_tokens_to_ids([name] if name in METASPACE.get_vocab() else bytewise)
    return ids


def decode(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces(tokenizer, ids: list[int], sizes: list[int] | None = None) -> list[str]:
    """One token at a time, or as many as ``sizes`` say; the last piece is what `finish` gives."""
    decoder, found, start = Detokenizer(tokenizer), [], 0
    for size in sizes or [1] * len(ids):
        found.append(decoder.add(ids[start : start + size]))
        start += size
    return [*found, decoder.finish()]


def test_the_byte_tokenizer_gives_one_token_per_byte():
    assert BYTES(TEXT)["input_ids"] == byte_ids(TEXT.encode())
    assert decode(BYTES, byte_ids(TEXT.encode())) == TEXT


def test_characters_of_several_tokens_come_out_whole():
    found = pieces(BYTES, byte_ids(TEXT.encode()))
    assert [piece for piece in found if piece] == list(TEXT)
    assert found[:6] == ["", "é", "", "", "", "😀"]
    assert found[-1] == ""


@pytest.mark.parametrize("length", range(len(TEXT.encode()) + 1))
def test_a_text_cut_anywhere_shows_its_whole_characters_and_at_most_one_replacement(length):
    data = TEXT.encode()[:length]
    *streamed, last = pieces(BYTES, byte_ids(data))
    assert "".join(streamed) == data.decode(errors="ignore")
    assert last in ("", REPLACEMENT)
    assert "".join(streamed) + last == decode(BYTES, byte_ids(data))


def test_a_space_that_arrives_while_bytes_are_pending_is_kept():
    data = "😀".encode()[:3] + b" a"
    assert "".join(pieces(BYTES, byte_ids(data))) == f"{REPLACEMENT} a"
    assert "".join(pieces(METASPACE, words("b", "▁a", "😀", "▁a", "a"))) == "b a😀 aa"


@pytest.mark.parametrize(
    "data", [b"\xff", b"\xff\xfeab", b"a\xc3", b"\xc3\xc3\xa9", b"\xf0\x9f\xf0\x9f\x98\x80", b"a\x80b"]
)
def test_invalid_bytes_become_replacements_as_in_one_decode(data):
    assert "".join(pieces(BYTES, byte_ids(data))) == decode(BYTES, byte_ids(data)) == data.decode(errors="replace")


def test_a_true_replacement_character_is_kept():
    assert "".join(pieces(BYTES, byte_ids("a\ufffdb\ufffd".encode()))) == "a\ufffdb\ufffd"


def test_special_tokens_are_not_shown():
    ids = [BOS, *byte_ids("é😀".encode()), EOS, 0, *byte_ids(b"a"), EOS]
    assert "".join(pieces(BYTES, ids)) == "é😀a"


def test_a_special_token_inside_a_character_does_not_break_it():
    first, second = byte_ids("😀".encode()[:2]), byte_ids("😀".encode()[2:])
    assert "".join(pieces(BYTES, [*first, EOS, *second])) == decode(BYTES, [*first, EOS, *second]) == "😀"


def test_nothing_in_nothing_out():
    assert pieces(BYTES, []) == [""]
    decoder = Detokenizer(BYTES)
    assert decoder.add([]) == decoder.add(byte_ids("é".encode()[:1])) == decoder.add([]) == ""
    assert decoder.add(byte_ids("é".encode()[1:])) == "é"
    assert decoder.add([]) == decoder.finish() == ""
    assert "".join(pieces(METASPACE, words("▁the", "▁a"), [1, 0, 0, 1])) == "the a"


@given(st.lists(st.integers(3, 258)), st.lists(st.integers(0, 5)))
@example(byte_ids(TEXT.encode()), [3, 3, 3, 3, 3, 3])
def test_any_bytes_in_any_steps_give_the_text_of_one_decode(ids, sizes):
    sizes = [*sizes, max(0, len(ids) - sum(sizes))]
    assert "".join(pieces(BYTES, ids, sizes)) == decode(BYTES, ids)
    assert "".join(pieces(BYTES, ids)) == decode(BYTES, ids)


@given(st.lists(st.integers(0, 258)))
def test_special_tokens_anywhere_leave_the_text_of_one_decode(ids):
    assert "".join(pieces(BYTES, ids)) == decode(BYTES, ids)


@given(st.text())
def test_pieces_of_a_text_never_hold_half_a_character(text):
    found = pieces(BYTES, byte_ids(text.encode()))
    assert "".join(found) == text
    assert all(REPLACEMENT not in piece for piece in found) or REPLACEMENT in text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("▁the", "▁a", "b", ".", "▁b"), "the ab. b"),
        (("a", "▁", "▁a"), "a  a"),
        (("▁", "▁", "▁a", "▁▁", "b"), "  a  b"),
        (("▁▁", "▁the"), "  the"),
        (("a", "\n", "▁the", "▁é", "삼", "😀", "▁b"), "a\n the é삼😀 b"),
        (("<s>", "▁the", "▁a", "</s>"), "the a"),
    ],
)
def test_leading_spaces_of_words_are_kept_and_the_first_of_the_text_is_not(names, text):
    assert decode(METASPACE, words(*names)) in (text, text[1:])
    assert "".join(pieces(METASPACE, words(*names))) == decode(METASPACE, words(*names))


@pytest.mark.parametrize("special", ["</s>", "<s>", "<unk>"])
def test_a_space_after_a_special_token_is_kept(special):
    ids = words("▁the", special, "▁a")
    assert "".join(pieces(METASPACE, ids)) == decode(METASPACE, ids) == "the a"


@given(st.lists(st.sampled_from([*WORDS, "😀", "é"])))
def test_any_words_give_the_text_of_one_decode(names):
    assert "".join(pieces(METASPACE, words(*names))) == decode(METASPACE, words(*names))


@given(st.lists(st.sampled_from([*WORDS, "<s>", "</s>"])))
def test_any_words_and_special_tokens_give_the_text_of_one_decode(names):
    assert "".join(pieces(METASPACE, words(*names))) == decode(METASPACE, words(*names))


def test_a_control_token_without_a_role_is_hidden_and_the_space_after_it_is_kept():
    tokenizer = metaspace_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("▁b", special=True)])
    ids = words("▁the", "▁b", "▁a")
    assert "".join(pieces(tokenizer, ids)) == decode(tokenizer, ids) == "the a"


def test_byte_tokens_that_are_no_character_end_without_an_error():
    for ids in (words("a", "😀")[:-1], words("😀")[:1], words("a") + METASPACE.convert_tokens_to_ids(["<0xFF>"] * 3)):
        *streamed, last = pieces(METASPACE, ids)
        assert "".join(streamed) == "a" * (ids[0] == words("a")[0])
        assert set(last) == {REPLACEMENT}


def test_the_window_that_is_decoded_stays_short():
    class Counting:
        longest = 0
        all_special_ids, added_tokens_decoder = BYTES.all_special_ids, BYTES.added_tokens_decoder

        def decode(self, ids, **kwargs):
            self.longest = max(self.longest, len(ids))
            return BYTES.decode(ids, **kwargs)

    counting = Counting()
    assert "".join(pieces(counting, byte_ids((TEXT * 100).encode()))) == TEXT * 100
    assert counting.longest <= 8
