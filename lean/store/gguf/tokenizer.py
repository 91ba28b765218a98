"""The tokenizer of a GGUF file, built from its metadata.

transformers can convert a GGUF tokenizer too, but it does not read all of its data: the way text is split, the types of
the tokens, and several switches.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lean.store.gguf.ends import BYTE, CONTROL, UNKNOWN, USER_DEFINED
from lean.store.gguf.file import GgufFile
from lean.store.gguf.vocabulary import BYTE_LEVEL, GEMMA4, Vocabulary, read_vocabulary

log = logging.getLogger("lean")

SPACE = "\u2581"  # what SentencePiece writes for a space
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
# Bytes of UTF-8 text: no other control characters, and of the planes above the first two nothing.
_TEXT_BYTES = {*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)}


def load_gguf_tokenizer(file: GgufFile) -> tuple[Any, frozenset[int]]:
    """(tokenizer, ids that end a generation) of a GGUF model.

    Raises:
        ModelError: as `read_vocabulary`.
    """
    from transformers import PreTrainedTokenizerFast

    name = file.path.name
    vocabulary = read_vocabulary(file.metadata, name)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(vocabulary, name),
        clean_up_tokenization_spaces=False,  # text comes out as the tokens spell it
        **{f"{word}_token": vocabulary.tokens[index] for word, index in vocabulary.roles.items()},
    )
    tokenizer.chat_template = vocabulary.chat_template
    return tokenizer, vocabulary.ends


def build_tokenizer(vocabulary: Vocabulary, name: str) -> Tokenizer:
    """The vocabulary as a tokenizer of the tokenizers library."""
    tokenizer = _byte_level(vocabulary) if vocabulary.model == BYTE_LEVEL else _with_spaces(vocabulary)
    _warn_of_lost_bytes(vocabulary, name)
    added = (UNKNOWN, CONTROL, USER_DEFINED)
    tokenizer.add_tokens(
        [
            AddedToken(
                token, special=kind != USER_DEFINED, normalized=False, rstrip=_swallows_spaces(vocabulary, token, kind)
            )
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in added
        ]
    )
    tokenizer.post_processor = _around(vocabulary)
    return tokenizer


def _swallows_spaces(vocabulary: Vocabulary, token: str, kind: int) -> bool:
    return vocabulary.swallow_spaces and kind != UNKNOWN and token not in ("<s>", "<unk>", "<|endoftext|>")


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """Tokens are written in an alphabet of 256 characters, one for each byte."""
    rule = vocabulary.rule
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=list(vocabulary.merges), ignore_merges=rule.ignore_merges)
    )
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rule.splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    rewrites = [decoders.Replace(Regex(old), new) for old, new in _misread(vocabulary)]
    tokenizer.decoder = decoders.Sequence([*rewrites, decoders.ByteLevel()]) if rewrites else decoders.ByteLevel()
    return tokenizer


def _misread(vocabulary: Vocabulary) -> Iterator[tuple[str, str]]:
    """(pattern, replacement) of each token that is plain text, but would be read in the alphabet of bytes: é is one
    byte there."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = bytes_to_unicode()
    letters = set(alphabet.values())
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and not token.isascii() and letters.issuperset(token):
            yield rf"\A{re.escape(token)}\z", "".join(alphabet[byte] for byte in token.encode())


def _with_spaces(vocabulary: Vocabulary) -> Tokenizer:
    """Tokens are plain text with a sign for the space; characters without a token become the tokens of their bytes."""
    unknown = vocabulary.tokens[vocabulary.named["unk"]] if "unk" in vocabulary.named else None
    merges = list(vocabulary.merges) if vocabulary.model == GEMMA4 else _merges_by_score(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prepend = [normalizers.Prepend(SPACE)] if vocabulary.add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    if vocabulary.model == GEMMA4:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, the third with the highest score first."""
    texts = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind not in (UNKNOWN, CONTROL, BYTE)
    }
    ranked = []
    for token, index in texts.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in texts and right in texts:
                ranked.append((-vocabulary.scores[index], -cut, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for *_, left, right in ranked]


def _around(vocabulary: Vocabulary) -> Any:
    """What puts BOS and EOS around a text, and around each text of a pair."""
    wanted = {"bos": vocabulary.add_bos, "eos": vocabulary.add_eos}
    specials = []
    for word in (word for word in wanted if wanted[word]):
        index = vocabulary.named[word]
        specials.append({"id": word, "ids": [index], "tokens": [vocabulary.tokens[index]]})

    def around(sequence: str, kind: int) -> list[str]:
        words = ("bos", sequence, "eos")
        return [f"{word}:{kind}" for word in words if wanted.get(word, True)]

    return processors.TemplateProcessing(
        single=around("$A", 0), pair=around("$A", 0) + around("$B", 1), special_tokens=specials
    )


def _warn_of_lost_bytes(vocabulary: Vocabulary, name: str) -> None:
    """A warning where text can hold bytes that no token stands for: the tokenizers library drops them."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if vocabulary.model != BYTE_LEVEL and "unk" in vocabulary.named:
        return
    tokens = list(bytes_to_unicode().items()) if vocabulary.model == BYTE_LEVEL else list(enumerate(_BYTE_TOKENS))
    ids = vocabulary.ids
    lost = [byte for byte, token in tokens if token not in ids and byte in _TEXT_BYTES]
    if lost:
        log.warning("%s: the vocabulary has no token for %d of the bytes of text, which are left out", name, len(lost))
