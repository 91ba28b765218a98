"""Metadata of small GGUF tokenizers, as `read_gguf` gives it."""

from pathlib import Path

from transformers.convert_slow_tokenizer import bytes_to_unicode

from lean.store.gguf.file import GgufFile
from lean.store.gguf.tokenizer import load_gguf_tokenizer

ALPHABET = bytes_to_unicode()
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def written(text: str) -> str:
    """Text in the alphabet of bytes."""
    return "".join(ALPHABET[byte] for byte in text.encode())


def byte_level(marked: dict[str, int] | None = None, words: tuple[str, ...] = (), **changes: object) -> dict:
    """Ids 0 to 255 are the bytes; then ``words`` with the merges that lead to them; then ``marked`` tokens by type.

    ``changes`` are keys without `tokenizer.ggml.`; None removes one.
    """
    tokens, merges = [ALPHABET[byte] for byte in range(256)], []
    for word in words:
        letters = written(word)
        for end in range(2, len(letters) + 1):
            if letters[:end] not in tokens:
                tokens.append(letters[:end])
                merges.append(f"{letters[: end - 1]} {letters[end - 1]}")
    types = [NORMAL] * len(tokens) + list((marked or {}).values())
    return _metadata("gpt2", [*tokens, *(marked or {})], types, {"pre": "gpt-2", "merges": merges, **changes})


def sentencepiece(words: dict[str, float], marked: dict[str, int] | None = None, **changes: object) -> dict:
    """Ids 0 <unk>, 1 <s>, 2 </s>, 3 to 258 the bytes, then ``words`` with their scores, then ``marked`` tokens by type.

    Only ASCII letters, digits, the space and punctuation are tokens of their own.
    """
    letters = {chr(code): -1000.0 - code for code in range(33, 127)} | {"▁": -1000.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(letters | words), *(marked or {})]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(letters | words), *(marked or {}).values()]
    scores = [0.0] * 259 + list((letters | words).values()) + [0.0] * len(marked or {})
    return _metadata("llama", tokens, types, {"pre": "default", "scores": scores, **changes})


def _metadata(model: str, tokens: list[str], types: list[int], keys: dict[str, object]) -> dict:
    found = {"model": model, "tokens": tokens, "token_type": types, **keys}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def load(metadata: dict) -> tuple:
    """(tokenizer, end ids) of metadata."""
    return load_gguf_tokenizer(GgufFile(Path("tiny.gguf"), (), metadata, {}, 0))


def ids_of(metadata: dict, text: str) -> list[int]:
    """Ids of a text, with what the file adds around it."""
    return load(metadata)[0](text)["input_ids"]
