"""Single tokens as text and as bytes, for reports of log-probabilities."""

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # SentencePiece's


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes: GPT-2's table."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Vocabulary:
    """The tokens of a tokenizer, which must be this object's own: one in use elsewhere may be busy.

    Any thread may call any method: nothing changes the tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._alphabet = _byte_alphabet() if "ByteLevel" in repr(decoder) else {}
        self._added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; those of a part of a character are no text by themselves."""
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def text_of(self, token_id: int) -> str:
        """A token as text; bytes that are no character become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def offsets(self, token_ids: Iterable[int], start: int = 0) -> list[int]:
        """For each token, how many characters are complete before it, counted from ``start``."""
        decode = getincrementaldecoder("utf-8")("replace").decode
        found = []
        for token_id in token_ids:
            found.append(start)
            start += len(decode(self.bytes_of(token_id)))
        return found

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", "replace")
        written = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(written, str):  # a padding row of the vocabulary
            return b""
        if self._alphabet and all(character in self._alphabet for character in written):
            return bytes(self._alphabet[character] for character in written)
        if match := _BYTE.fullmatch(written):
            return bytes([int(match[1], 16)])
        return written.replace(_SPACE, " ").encode("utf-8", "replace")
