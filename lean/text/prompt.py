"""Prompts and conversations to token ids.

In a chat only the template writes control tokens: where a message spells one, it stays text. A raw prompt has no such
protection: special tokens that its text spells become control tokens. That is the purpose of raw mode.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from lean.errors import EMPTY_PROMPT, RequestError, one_line
from lean.text.contents import check_arrival, mark, spans, write
from lean.text.template import has_template, is_utf8, template_of

log = logging.getLogger("lean")

Message = Mapping[str, str]
ROLES = ("system", "user", "assistant", "tool")


def encode_prompt(tokenizer: Any, prompt: str, chat: bool | None = None) -> list[int]:
    """Token ids of a prompt.

    Args:
        chat: True puts the text into the model's chat template. False takes it raw: special tokens in the text become
            control tokens. None is True where the model has a template.

    Raises:
        RequestError: an empty prompt, text that is not UTF-8, a chat without a template, or a template that fails.
    """
    if not prompt:
        raise RequestError(EMPTY_PROMPT)
    if not is_utf8(prompt):
        raise RequestError("the prompt is not valid UTF-8 text")
    if chat or (chat is None and has_template(tokenizer)):
        return encode_chat(tokenizer, [{"role": "user", "content": prompt}])
    ids = token_ids(tokenizer, prompt, add_special_tokens=True)
    if has_second_bos(tokenizer, ids):
        log.warning("the prompt begins with %s and the tokenizer adds another one", tokenizer.bos_token)
    return ids


def has_second_bos(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether a prompt begins with two BOS: its text spells one, and the tokenizer adds another one."""
    return tokenizer.bos_token_id is not None and list(ids[:2]) == [tokenizer.bos_token_id] * 2


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a whole conversation, up to where the model's next answer begins.

    Of a message, the template sees role (system, user, assistant or tool) and content (text). The template writes the
    BOS.

    Raises:
        RequestError: a message of another shape, no template, a template that fails, or one that changes a content
            which spells a control token.
    """
    return _encode(tokenizer, _checked(messages))


def encode_next_turn(tokenizer: Any, messages: Sequence[Message], last_token_ids: Sequence[int]) -> list[int]:
    """Token ids to append to a conversation whose earlier tokens stay as they are.

    These are what the template writes between the assistant's last content and the next answer.

    Args:
        messages: the whole conversation; its last two are the assistant's answer and the new user message.
        last_token_ids: the last ids of the answer as generated, a few or all. An end-of-turn token at their end is not
            written again; an answer without one gets it.

    Raises:
        RequestError: as `encode_chat`, or a template that does not write the last answer exactly once.
    """
    turns = _checked(messages)
    if [turn["role"] for turn in turns[-2:]] != ["assistant", "user"]:
        raise RequestError("a next turn needs the assistant's answer and a user message as the last two messages")
    answer = turns[-2]["content"] = mark()  # in its place, as a template may trim the answer itself
    ids = _encode(tokenizer, turns, after=answer)
    if last_token_ids and last_token_ids[-1] in ids:
        end = ids.index(last_token_ids[-1])
        is_control = ids[end] in _control_tokens(tokenizer).values()
        if is_control and not tokenizer.decode(ids[:end]).strip():  # some templates put a space before it
            return ids[end + 1 :]
    return ids


def _checked(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Role and content of each message, in a new list. Raises RequestError for a message of another shape."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError(f"a conversation is a list of messages, not {type(messages).__name__}")
    if not messages:
        raise RequestError("the conversation is empty: give at least one message")
    turns = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be a mapping with role and content, not {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise RequestError(f"{where} has no {key}")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise RequestError(f"{where} has the role {one_line(repr(role), 40)}: it must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise RequestError(f"{where}: the content must be text, not {type(content).__name__}")
        if not is_utf8(content):
            raise RequestError(f"{where}: the content is not valid UTF-8 text")
        turns.append({"role": role, "content": content})
    return turns


def _encode(tokenizer: Any, turns: list[dict[str, str]], after: str = "") -> list[int]:
    """Ids of the rendered conversation, or of what it has after the only occurrence of ``after``."""
    template = template_of(tokenizer)
    text = write(template, turns)
    if after and text.count(after) != 1:
        raise RequestError(
            f"{template.title} cannot continue a conversation: it must write the last answer exactly once"
        )
    check_arrival(template, turns, text)
    start = text.index(after) + len(after)
    tokens = [token for token in _control_tokens(tokenizer) if token in text]
    spelled = {index: token for index, turn in enumerate(turns) for token in tokens if token in turn["content"]}
    found = spans(template, turns, spelled, text) if spelled else []
    if found is None:
        index, token = next(iter(spelled.items()))
        raise RequestError(
            f"messages[{index}] contains the control token {one_line(token)}, and {template.title} changes contents, "
            "so lean cannot keep that token apart from those of the template: remove it"
        )
    bounds = [start, *(cut for cut in _cuts(text, found, tokens) if cut > start), len(text)]
    ids: list[int] = []
    for begin, end in pairwise(bounds):
        ids += _piece_ids(tokenizer, text[begin:end], continues=begin > 0)
    return ids


def _control_tokens(tokenizer: Any) -> dict[str, int]:
    """Added tokens, special or not. Left out are those of white space alone, which are vocabulary (Gemma's newlines,
    GPT-NeoX's indents), and those of one character, which cannot be split."""
    added = tokenizer.get_added_vocab().items()
    return {token: index for token, index in added if len(token) > 1 and token.replace("▁", " ").strip()}


def _cuts(text: str, spans: list[tuple[int, int, int]], tokens: list[str]) -> list[int]:
    """Where to cut the text: inside the text of every token that overlaps a span, and inside no other."""
    cuts = set()
    for _, start, end in spans:
        for token in tokens:
            at = text.find(token, max(0, start - len(token) + 1), end + len(token) - 1)
            while at >= 0:
                cuts.add(max(at + 1, start))
                at = text.find(token, at + 1, end + len(token) - 1)
    return sorted(cuts)


def token_ids(tokenizer: Any, text: str, add_special_tokens: bool | None = False) -> list[int]:
    """Token ids of a text.

    Args:
        add_special_tokens: whether the tokenizer adds tokens such as BOS; None: as it does by default.

    Raises:
        RequestError: the text is not text in UTF-8, or the tokenizer, whose files may be damaged, cannot encode it.
    """
    if not isinstance(text, str):
        raise RequestError(f"a text to encode must be a string, not {type(text).__name__}")
    if not is_utf8(text):
        raise RequestError("the text is not valid UTF-8: it has half of a surrogate pair")
    special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
    try:
        return list(tokenizer(text, verbose=False, **special)["input_ids"])
    except Exception as error:
        raise RequestError(f"the model's tokenizer cannot encode this text: {one_line(error)}") from None


def _piece_ids(tokenizer: Any, text: str, continues: bool) -> list[int]:
    if continues:  # SentencePiece puts a space before every text; here it goes before the newline
        newline, joined = token_ids(tokenizer, "\n"), token_ids(tokenizer, "\n" + text)
        if joined[: len(newline)] == newline:
            return joined[len(newline) :]
    return token_ids(tokenizer, text)
