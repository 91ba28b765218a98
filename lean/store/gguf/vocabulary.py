"""What a GGUF file says about its tokenizer: read, checked, and completed with the defaults of llama.cpp.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
Defaults: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean.errors import one_line
from lean.store.gguf.ends import BYTE, CONTROL, NORMAL, UNKNOWN, disguised_ends, end_ids
from lean.store.gguf.pretokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from lean.store.gguf.tokenizer_keys import FURTHER_TEMPLATE, ID_KEYS, UNNEEDED_IDS, TokenizerMetadata, check_keys

log = logging.getLogger("lean")

ROLES = ("bos", "eos", "unk", "pad")
BYTE_LEVEL, SENTENCEPIECE, GEMMA4 = "gpt2", "llama", "gemma4"  # `tokenizer.ggml.model`
_OTHER_MODELS = {
    "bert": "WordPiece",
    "t5": "unigram",
    "rwkv": "RWKV",
    "plamo2": "PLaMo 2",
    "hybriddna": "DNA k-mers",
    "whitespace": "whole words",
    "no_vocab": "none",
    "none": "none",
}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as data.

    Attributes:
        model: BYTE_LEVEL, SENTENCEPIECE or GEMMA4.
        rule: how text is cut into words; of BYTE_LEVEL only.
        tokens: text by id, as stored; no text occurs twice.
        types: token type by id, see `lean.store.gguf.ends`.
        scores: by id, of SENTENCEPIECE only. The best pair of neighbours is merged first.
        merges: pairs in the order of their rank; not of SENTENCEPIECE.
        named: ids by the word of their key: `bos`, `eos`, `unk`, `pad` and others.
        roles: those of `bos`, `eos`, `unk` and `pad` that belong to control tokens.
        ends: ids that end a generation.
        swallow_spaces: control tokens take the white space after them.
        chat_template: the default one.
    """

    model: str
    rule: PreTokenizer
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]
    named: Mapping[str, int]
    roles: Mapping[str, int]
    ends: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    swallow_spaces: bool
    chat_template: str | None

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


def read_vocabulary(metadata: Mapping[str, Any], name: str) -> Vocabulary:
    """The tokenizer that a file's metadata describes.

    Args:
        metadata: every pair of the file as a Python value.
        name: the file, for messages.

    Raises:
        ModelError: a kind of tokenizer or a switch that lean does not serve, or data that contradict each other.
    """
    pairs = TokenizerMetadata(metadata, name)
    model = _model(pairs)
    check_keys(pairs)
    rule = _rule(pairs, model)
    tokens = _tokens(pairs)
    ids = {token: index for index, token in enumerate(tokens)}
    types = _types(pairs, tokens)
    named = _named(pairs, model, types)
    for index in disguised_ends(ids, types):
        log.warning(
            "%s: token %d, %s, is taken as a control token, although its type says not", name, index, tokens[index]
        )
        types[index] = CONTROL
    merges = _merges(pairs, model, ids, types)
    roles = _roles(name, model, ids, types, named, merges)
    add_bos, add_eos = _added(pairs, model, rule, named)
    prefix = pairs.flag("add_space_prefix")
    if prefix and model != SENTENCEPIECE:
        log.warning("%s: tokenizer.ggml.add_space_prefix has no effect on a vocabulary of this kind", name)
    title = one_line(metadata.get("general.name", "")).lower()
    return Vocabulary(
        model,
        rule,
        tokens,
        types,
        _scores(pairs, model, len(tokens)),
        merges,
        named,
        roles,
        end_ids(ids, types, named),
        add_bos,
        add_eos,
        model == SENTENCEPIECE and prefix is not False,
        # Phi-3's control tokens take the white space after them, which GGUF has no key for.
        model == SENTENCEPIECE
        and metadata.get("general.architecture") == "phi3"
        and bool(re.search("phi[ -]?3", title)),
        _chat_template(pairs),
    )


def _model(pairs: TokenizerMetadata) -> str:
    model = pairs.value("tokenizer.ggml.model", str, "text")
    if model in (BYTE_LEVEL, SENTENCEPIECE, GEMMA4):
        return model
    if model is None:
        raise pairs.fault("it has no tokenizer (no tokenizer.ggml.model): lean needs a file with one")
    kind = f" ({_OTHER_MODELS[model]})" if model in _OTHER_MODELS else ""
    raise pairs.fault(
        f"tokenizer.ggml.model is {one_line(model, 40)!r}{kind}: lean serves {BYTE_LEVEL}, {SENTENCEPIECE} and {GEMMA4}"
    )


def _rule(pairs: TokenizerMetadata, model: str) -> PreTokenizer:
    pre = pairs.value("tokenizer.ggml.pre", str, "text")
    if model != BYTE_LEVEL:
        return PreTokenizer(())
    if not pre:
        log.warning(
            "%s has no tokenizer.ggml.pre: text is split by llama.cpp's default, maybe not as in training", pairs.name
        )
        return DEFAULT
    if pre not in PRE_TOKENIZERS:
        raise pairs.fault(
            f"tokenizer.ggml.pre is {one_line(pre, 40)!r}, a way to split text that lean does not know: "
            "use the model's safetensors checkpoint, or another conversion"
        )
    return PRE_TOKENIZERS[pre]


def _tokens(pairs: TokenizerMetadata) -> list[str]:
    tokens = pairs.array("tokens", (str,), "texts")
    if not tokens:
        raise pairs.fault("it has no tokenizer.ggml.tokens: lean needs a file with a vocabulary")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]  # llama.cpp's name
    if len(set(tokens)) < len(tokens):
        first: dict[str, int] = {}
        for index, token in enumerate(tokens):
            if first.setdefault(token, index) != index:
                raise pairs.fault(f"the token {one_line(repr(token), 60)} has two ids, {first[token]} and {index}")
    return tokens


def _same_length(pairs: TokenizerMetadata, word: str, values: list[Any], count: int) -> None:
    if len(values) != count:
        raise pairs.fault(f"tokenizer.ggml.{word} has {len(values)} entries for {count} tokens")


def _types(pairs: TokenizerMetadata, tokens: list[str]) -> list[int]:
    types = pairs.array("token_type", (int,), "whole numbers")
    if types is None:
        return [NORMAL] * len(tokens)
    _same_length(pairs, "token_type", types, len(tokens))
    for index, kind in enumerate(types):
        if not 1 <= kind <= 6:
            raise pairs.fault(f"token {index}, {one_line(repr(tokens[index]), 40)}, has type {kind}: types are 1 to 6")
    return list(types)


def _named(pairs: TokenizerMetadata, model: str, types: list[int]) -> dict[str, int]:
    """Ids by role. Without a key, SentencePiece's usual ids count where the types confirm them."""
    for key in UNNEEDED_IDS & pairs.metadata.keys():
        pairs.token_id(key, len(types))
    found = {word: pairs.token_id(f"tokenizer.ggml.{key}", len(types)) for word, key in ID_KEYS.items()}
    if model == SENTENCEPIECE:
        for word, index, kind in (("unk", 0, UNKNOWN), ("bos", 1, CONTROL), ("eos", 2, CONTROL)):
            if found[word] is None and index < len(types) and types[index] == kind:
                found[word] = index
    return {word: index for word, index in found.items() if index is not None}


def _roles(
    name: str,
    model: str,
    ids: Mapping[str, int],
    types: list[int],
    named: Mapping[str, int],
    merges: list[tuple[str, str]],
) -> dict[str, int]:
    """The roles that control tokens have. A token with a role becomes one in ``types``, unless text can spell it."""
    tokens = list(ids)
    made = {"".join(pair) for pair in merges}

    def is_ordinary(index: int) -> bool:
        token = tokens[index]
        cuts = range(1, len(token)) if model == SENTENCEPIECE else ()
        made_here = token in made or any(token[:cut] in ids and token[cut:] in ids for cut in cuts)
        return types[index] == BYTE or (types[index] == NORMAL and (len(token) == 1 or made_here))

    roles = {}
    for word, index in named.items():
        if is_ordinary(index):
            if word in ROLES:
                shown = one_line(repr(tokens[index]), 40)
                log.warning("%s: the %s token, %s, is part of ordinary text and stays so", name, word.upper(), shown)
            continue
        if types[index] != UNKNOWN and not word.startswith("fim"):
            types[index] = UNKNOWN if word == "unk" and types[index] != CONTROL else CONTROL
        if word in ROLES:
            roles[word] = index
    return roles


def _scores(pairs: TokenizerMetadata, model: str, count: int) -> list[float]:
    scores = pairs.array("scores", (float, int), "numbers")
    if scores is not None:
        _same_length(pairs, "scores", scores, count)
    if model != SENTENCEPIECE:
        return []
    if scores is None:
        raise pairs.fault("it has no tokenizer.ggml.scores, which order the merges of this kind of vocabulary")
    if any(math.isnan(score) for score in scores):
        raise pairs.fault("tokenizer.ggml.scores holds NaN")
    return scores


def _merges(pairs: TokenizerMetadata, model: str, ids: Mapping[str, int], types: list[int]) -> list[tuple[str, str]]:
    lines = pairs.array("merges", (str,), "texts")
    if model == SENTENCEPIECE:
        return []
    if lines is None:
        if any(kind == NORMAL and len(token) > 1 for token, kind in zip(ids, types, strict=True)):
            raise pairs.fault("it has no tokenizer.ggml.merges, which lead to the tokens of several letters")
        return []
    merges = []
    for index, line in enumerate(lines):
        cut = line.find(" ", 1)
        pair = line[:cut], line[cut + 1 :]
        if cut < 0 or not all(part in ids for part in (*pair, "".join(pair))):
            raise pairs.fault(f"merge {index}, {one_line(repr(line), 60)}, does not join two tokens into a third")
        merges.append(pair)
    return merges


def _added(pairs: TokenizerMetadata, model: str, rule: PreTokenizer, named: Mapping[str, int]) -> tuple[bool, bool]:
    """Whether BOS and EOS are put around a text."""
    bos, eos = pairs.flag("add_bos_token"), pairs.flag("add_eos_token")
    usual = model != BYTE_LEVEL or rule.add_bos
    if model == GEMMA4 and bos is False:
        log.warning("%s: tokenizer.ggml.add_bos_token is false, but Gemma 4 needs its BOS: it is added", pairs.name)
        bos = True
    for word, flag in (("bos", bos), ("eos", eos)):
        if flag and word not in named:
            raise pairs.fault(f"tokenizer.ggml.add_{word}_token is true, but tokenizer.ggml.{word}_token_id is missing")
    if bos is None and usual and "bos" not in named:
        log.warning("%s has no tokenizer.ggml.bos_token_id: prompts begin without a BOS", pairs.name)
    return (usual and "bos" in named) if bos is None else bos, bool(eos)


def _chat_template(pairs: TokenizerMetadata) -> str | None:
    template = pairs.value("tokenizer.chat_template", str, "text")
    others = sorted(key for key in pairs.metadata if key.startswith(FURTHER_TEMPLATE))
    if template is None and others:
        log.warning("%s has no default chat template, only %s: none is used", pairs.name, one_line(", ".join(others)))
    return template or None
