"""The tokens that end a generation, as llama.cpp finds them.

Rules and names: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types of a GGUF file

# Ends of a turn or of a text, whatever a file calls its EOS.
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "<EOT>",
    "_<EOT>",
    "▁<EOT>",
    "[e~[",
)
# The same, but also markup or plain text of some vocabularies: Gemma's </s> closes struck-out text.
_ENDS_IF_CONTROL = ("</s>", "<eos>", "[EOS]", "[EOT]")
# A model that fills in the middle ends there: padding, the next repository, the next file. A file may give the id.
_FILL_IN_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_END_IDS = ("eos", "eot", "eom")


def disguised_ends(ids: Mapping[str, int], types: Sequence[int]) -> list[int]:
    """Ids of NORMAL tokens whose text says beyond doubt that they are control tokens.

    Args:
        ids: token id by text.
        types: token type by id.
    """
    names = (*_ENDS, *(name for names in _FILL_IN_ENDS.values() for name in names))
    sure = (name for name in names if name.startswith(("<|", "<｜", "<end_of_")) and name in ids)
    return [ids[name] for name in sure if types[ids[name]] == NORMAL]


def end_ids(ids: Mapping[str, int], types: Sequence[int], named: Mapping[str, int]) -> frozenset[int]:
    """Ids of the tokens that end a generation.

    Args:
        ids: token id by text.
        types: token type by id.
        named: the ids that the file gives, by the word of their key: `eos`, `eot`, `eom`, `fim_pad` and so on.
    """
    control = {name for name in ids if types[ids[name]] == CONTROL}
    marked = {name for name in ids if types[ids[name]] in (CONTROL, USER_DEFINED)}
    found = {named[word] for word in _END_IDS if word in named}
    found |= {ids[name] for name in _ENDS if name in marked}
    found |= {ids[name] for name in _ENDS_IF_CONTROL if name in control}
    for word, names in _FILL_IN_ENDS.items():
        found |= {named[word]} if word in named else {ids[name] for name in names if name in control}
    found -= _not_ends(ids, found) - {named[word] for word in _END_IDS if word in named}
    return frozenset(found)


def _not_ends(ids: Mapping[str, int], found: set[int]) -> set[int]:
    """Tokens that look like ends and are none in the company of others."""
    company = {name for name in (*_ENDS, *_ENDS_IF_CONTROL) if ids.get(name) in found}
    refuted = set()
    # In gpt-oss's format <|end|> closes one message of several; <|return|> and <|call|> end the turn. Solar Open too.
    if {"<|return|>", "<|call|>"} <= company or ("<|flush|>" in company and company & {"<|call|>", "<|calls|>"}):
        refuted.add("<|end|>")
    if "<|tool_response>" in company:  # Gemma 4
        refuted.add("</s>")
    return {ids[name] for name in refuted & company}
