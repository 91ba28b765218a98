"""What each `tokenizer.*` key of a GGUF file is to lean: used, without effect, or a reason to refuse the file.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lean.errors import ModelError, one_line

log = logging.getLogger("lean")

# Every key of a tokenizer is in one of these tables; lean warns of any other.
ID_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "fim_pad": "fim_pad_token_id",
    "fim_rep": "fim_rep_token_id",
    "fim_sep": "fim_sep_token_id",
}
_USED = {
    "tokenizer.chat_template",
    *(
        f"tokenizer.ggml.{key}"
        for key in ("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token")
    ),
    "tokenizer.ggml.add_space_prefix",
    *(f"tokenizer.ggml.{key}" for key in ID_KEYS.values()),
}
# Ids that lean checks and does not need: of encoders, and of prompts that fill in the middle.
UNNEEDED_IDS = {
    f"tokenizer.ggml.{word}_token_id"
    for word in ("seperator", "separator", "cls", "mask", "prefix", "suffix", "middle", "fim_pre", "fim_suf", "fim_mid")
}
_NEUTRAL = {
    "tokenizer.huggingface.json": "the same vocabulary once more",
    "tokenizer.chat_templates": "names of further templates",
    "tokenizer.rwkv.world": "the vocabulary of another tokenizer",
    "tokenizer.ggml.added_tokens": "listed in tokens",
    "tokenizer.ggml.add_sep_token": "between the two texts of a pair",
    "tokenizer.ggml.token_type_count": "of the two texts of a pair",
    "tokenizer.ggml.normalizer.lowercase": "of WordPiece",
    "tokenizer.ggml.normalizer.strip_accents": "of WordPiece",
}
FURTHER_TEMPLATE = "tokenizer.chat_template."  # further templates
# Values that change nothing; another one is refused.
_ONLY = {
    "tokenizer.ggml.remove_extra_whitespaces": False,
    "tokenizer.ggml.treat_whitespace_as_suffix": False,
    "tokenizer.ggml.escape_whitespaces": True,
    "tokenizer.ggml.precompiled_charsmap": [],
    "tokenizer.ggml.suppress_tokens": [],
}


class TokenizerMetadata:
    """The metadata of a file, with checks of the values' kinds. Messages begin with the file's name."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self.metadata, self.name = metadata, name

    def fault(self, text: str) -> ModelError:
        return ModelError(f"{self.name}: {text}")

    def value(self, key: str, kind: type, what: str) -> Any:
        found = self.metadata.get(key)
        if found is not None and type(found) is not kind:
            raise self.fault(f"{key} is {one_line(repr(found), 40)}, not {what}")
        return found

    def flag(self, word: str) -> bool | None:
        return self.value(f"tokenizer.ggml.{word}", bool, "true or false")

    def array(self, word: str, kinds: tuple[type, ...], what: str) -> list[Any] | None:
        key = f"tokenizer.ggml.{word}"
        found = self.value(key, list, f"an array of {what}")
        if found is not None and any(type(item) not in kinds for item in found):
            odd = next(item for item in found if type(item) not in kinds)
            raise self.fault(f"{key} holds {one_line(repr(odd), 40)}: it must be an array of {what}")
        return found

    def token_id(self, key: str, count: int) -> int | None:
        found = self.value(key, int, "a token id")
        if found is not None and not 0 <= found < count:
            raise self.fault(f"{key} is {found}, but the file has {count} tokens: it is damaged or badly converted")
        return found


def check_keys(pairs: TokenizerMetadata) -> None:
    """Refuse values that would change the text or its tokens, and warn of keys that are in no table."""
    unknown = []
    for key, value in pairs.metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if key in _ONLY:
            if value != _ONLY[key]:
                raise pairs.fault(f"{key} is {one_line(value, 40)}, which lean does not serve")
        elif key not in _USED | UNNEEDED_IDS | _NEUTRAL.keys() and not key.startswith(FURTHER_TEMPLATE):
            unknown.append(one_line(key, 60))
    if unknown:
        log.warning("%s: metadata that lean does not know, not used: %s", pairs.name, ", ".join(sorted(unknown)))
