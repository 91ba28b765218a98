"""Token ids to text, piece by piece. A piece ends with a whole character and is never changed later."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are no character yet


_HIDDEN: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


def _hidden_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of all control tokens; a tokenizer's own list has only those with a role, such as BOS."""
    if tokenizer not in _HIDDEN:
        added = tokenizer.added_tokens_decoder.items()
        _HIDDEN[tokenizer] = frozenset(tokenizer.all_special_ids) | {index for index, token in added if token.special}
    return _HIDDEN[tokenizer]


class Detokenizer:
    """Streams the text of one sequence.

    The newest tokens are decoded with a short window of tokens before them; a piece is the text they add. Replacement
    characters at its end may still become a character, so they wait until more text follows or the stream ends.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = _hidden_ids(tokenizer)  # never shown, and no context for what follows
        self._ids: list[int] = []
        self._start = 0  # the window: tokens from here on, the first few only for context (spaces, merged characters)
        self._read = 0  # tokens before it had ended in a whole character
        self._given = 0  # characters of the window's text that are given out

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def add(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens; may be empty."""
        new = [token for token in token_ids if token not in self._special]
        if not new:
            return ""
        self._ids.extend(new)
        text = self._decode(self._ids[self._start :])
        certain = text.rstrip(REPLACEMENT)
        piece = certain[self._given :]
        if len(certain) < len(text):
            self._given = max(self._given, len(certain))
        else:
            self._start, self._read = self._read, len(self._ids)
            self._given = len(self._decode(self._ids[self._start :]))
        return piece

    def finish(self) -> str:
        """The text that was held back. A character without its last bytes becomes the replacement character."""
        text = self._decode(self._ids[self._start :])[self._given :]
        self._start = self._read = len(self._ids)
        self._given = 0
        return text
