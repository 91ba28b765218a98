"""What a chat template makes of the contents of messages: in which form it takes them, and where each one arrives.

Most templates write a content as it is, or without white space around it. Some take a list of parts instead of text.
Some leave a message out without a word: lean refuses that. To find out, lean renders marks in place of contents, once
for each template and sequence of roles.

What may be missing is the beginning of an answer that holds a closing tag: templates leave the reasoning of earlier
answers out, up to ``</think>`` or a tag of that kind. Characters within a content may be replaced. A content of white
space may vanish.
"""

import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from lean.errors import RequestError
from lean.text.template import ChatTemplate, Content, TemplateError

Turn = dict[str, str]  # role and content

ALPHABETS = ("0123456789abcdef", "ghjkmnpqrstvwz")  # two, as a template may replace a letter
_PROBE = 12  # letters of a mark that shows whether a content arrives: few, as templates may shorten contents
_DIGITS = 5
_CLOSING = re.compile(r"</[^<>\s]+>|<\|END_[^<>|]+\|>|\[/[^\[\]\s]+\]")  # </think>, <|END_THINKING|>, [/THINK]


def mark(alphabet: str = ALPHABETS[0], length: int = 32) -> str:
    """A random word: no message contains it, and hardly a template changes it."""
    return "x" + "".join(secrets.choice(alphabet) for _ in range(length))


class Form(NamedTuple):
    """How a template takes the contents of a sequence of roles.

    parts: indices of the messages whose content it takes as a list of parts.
    pieces: what it writes, as text, index, text, ..., index, text; None if that could not be seen.
    missing: indices of the messages that it does not write.
    """

    parts: frozenset[int]
    pieces: tuple[str | int, ...] | None
    missing: tuple[int, ...]


def write(template: ChatTemplate, turns: Sequence[Turn]) -> str:
    """The conversation as the template writes it, before its next answer.

    Raises:
        TemplateRefusal: the template raised an error.
        RequestError: see `ChatTemplate.render`.
    """
    try:
        return _write(template, turns)
    except TemplateError as error:
        raise template.refusal(error) from None


def write_open(template: ChatTemplate, turns: Sequence[Turn]) -> str:
    """The conversation up to the end of its last content, which is to be continued; it ends as the template trims it.

    Raises:
        TemplateRefusal, RequestError: as `write` and `check_arrival`.
    """
    end = mark() + " "  # as in transformers: a template that trims contents takes the space away
    marked = [*turns[:-1], {**turns[-1], "content": turns[-1]["content"] + end}]
    try:
        text = _write(template, marked, generation_prompt=False)
    except TemplateError as error:
        raise template.refusal(error) from None
    place = text.rfind(end.strip())
    if place < 0:
        raise RequestError(_missing(template, turns, len(turns) - 1, "the text"))
    check_arrival(template, marked, text, generation_prompt=False)
    return text[:place] if text.startswith(end, place) else text[:place].rstrip()


def check_arrival(template: ChatTemplate, turns: Sequence[Turn], text: str, generation_prompt: bool = True) -> None:
    """Raise RequestError, which names the message, unless every content of ``turns`` has arrived in ``text``."""
    form = _form(template, _roles(turns), generation_prompt)
    for index in form.missing:
        if _needed(turns[index])[1].strip():
            raise RequestError(_missing(template, turns, index, "the text"))
    if form.pieces is not None and _follows(form.pieces, turns, text):
        return
    lost = _shortened(template, turns, text, generation_prompt)
    if lost is not None:
        raise RequestError(_missing(template, turns, lost, "all of the text"))


def spans(
    template: ChatTemplate,
    turns: Sequence[Turn],
    indices: Collection[int],
    text: str,
    generation_prompt: bool = True,
) -> list[tuple[int, int, int]] | None:
    """(index, begin, end) in the rendered ``text`` of the contents of the turns ``indices``; None: they are not found.

    A rendering with marks in place of these contents gives the text around each of them. A second and a third one show
    every other content between marked neighbours: a content is rendered as what stands between the texts around it.
    Contents cannot imitate a mark, so none can pass for the text around it.
    """
    word = mark()

    def render(shown: set[int]) -> str:
        marked = [dict(turn) for turn in turns]
        for index in set(indices) - shown:
            marked[index]["content"] = f"{word}{index:06}"
        return _write(template, marked, generation_prompt)

    try:
        parts = re.split(f"({word}\\d{{6}})", render(set()))  # surroundings, mark, surroundings, ..., surroundings
        order = {place: int(parts[place][-6:]) for place in range(1, len(parts), 2)}
        places = list(order)
        whole = parts.copy()
        for shown in (places[::2], places[1::2]):
            rendered = render({order[place] for place in shown})
            assembled = parts.copy()
            for place in shown:
                left = parts[place - 2] if place > 1 else ""
                right = parts[place + 2] if place + 2 < len(parts) else ""
                begin = rendered.find(left) + len(left) + len(parts[place - 1])
                end = (rendered.find(right) if right else len(rendered)) - len(parts[place + 1])
                assembled[place] = whole[place] = rendered[begin:end]
            if "".join(assembled) != rendered:
                return None
    except TemplateError:  # a template that wants certain contents
        return None
    if "".join(whole) != text:
        return None
    ends = list(accumulate(map(len, whole)))
    return [(order[place], ends[place - 1], ends[place]) for place in places]


def _roles(turns: Sequence[Turn]) -> tuple[str, ...]:
    return tuple(turn["role"] for turn in turns)


def _write(template: ChatTemplate, turns: Sequence[Turn], generation_prompt: bool = True) -> str:
    form = _form(template, _roles(turns), generation_prompt)
    return _render(template, turns, form.parts, generation_prompt)


def _render(template: ChatTemplate, turns: Sequence[Turn], parts: Collection[int], generation_prompt: bool) -> str:
    def content(index: int, text: str) -> Content:
        return [{"type": "text", "text": text}] if index in parts else text

    return template.render(
        [{"role": turn["role"], "content": content(index, turn["content"])} for index, turn in enumerate(turns)],
        generation_prompt,
    )


@lru_cache(maxsize=128)
def _form(template: ChatTemplate, roles: tuple[str, ...], generation_prompt: bool) -> Form:
    """The form in which the most messages arrive. Text comes first.

    Then come parts for the messages that do not arrive as text, for all, and for all but the system's.
    """
    best = _probe(template, roles, frozenset(), generation_prompt)
    tries: list[frozenset[int]] = []
    if "text" in template.text:  # the key of a part's text
        everything = frozenset(range(len(roles)))
        tries = [everything, frozenset(index for index in everything if roles[index] != "system")]
        if best is not None:
            tries.insert(0, frozenset(best.missing))
    for parts in dict.fromkeys(tries):
        if best is not None and not best.missing:
            break
        form = _probe(template, roles, parts, generation_prompt)
        if form is not None and (best is None or len(form.missing) < len(best.missing)):
            best = form
    return best or Form(frozenset(), None, ())


def _probe(
    template: ChatTemplate, roles: tuple[str, ...], parts: frozenset[int], generation_prompt: bool
) -> Form | None:
    """What arrives in this form; None if the template raises an error for marks."""
    missing = set(range(len(roles)))
    pieces = None
    for alphabet in ALPHABETS:
        word = mark(alphabet, _PROBE)
        marks = [_numbered(word, alphabet, index) for index in range(len(roles))]
        try:
            turns = [{"role": role, "content": one} for role, one in zip(roles, marks)]
            text = _render(template, turns, parts, generation_prompt)
        except TemplateError:
            return None
        found = _found(word, alphabet, text)
        missing -= {index for index, one in enumerate(marks) if one in found}
        if not missing:
            split = re.split(f"({word}[{alphabet}]{{{_DIGITS}}})", text)
            number = {one: index for index, one in enumerate(marks)}
            if set(split[1::2]) == set(marks):
                pieces = tuple(number[piece] if place % 2 else piece for place, piece in enumerate(split))
            break
    return Form(parts, pieces, tuple(sorted(missing)))


def _numbered(word: str, alphabet: str, index: int) -> str:
    """The word and a number in letters of the alphabet."""
    return word + "".join(alphabet[index // len(alphabet) ** place % len(alphabet)] for place in range(_DIGITS))


def _found(word: str, alphabet: str, text: str) -> set[str]:
    """The numbered words in a text, in whatever case, but not in a list of parts as Python or JSON shows it."""
    one, lower = f"({word}[{alphabet}]{{{_DIGITS}}})", text.lower()
    shown = re.findall(f"type.{{1,9}}text.{{1,16}}text.{{1,9}}{one}", lower)
    shown += re.findall(f"text.{{1,9}}{one}.{{1,16}}type.{{1,9}}text", lower)
    return set(re.findall(one, lower)) - set(shown)


def _needed(turn: Turn) -> tuple[str, str]:
    """What may vanish of a content, and what must arrive."""
    content = turn["content"]
    tags = [*_CLOSING.finditer(content)] if turn["role"] == "assistant" else []
    end = tags[-1].end() if tags else 0
    return content[:end], content[end:]


def _spellings(turn: Turn) -> Iterator[str]:
    """How templates usually write a content."""
    content, (begin, rest) = turn["content"], _needed(turn)
    for text in (content, rest) if begin else (content,):
        yield from (text, text.strip(), text.lstrip(), text.rstrip(), text.lstrip("\n"), text.strip("\n"))


def _follows(pieces: tuple[str | int, ...], turns: Sequence[Turn], text: str) -> bool:
    """Whether the text is the pieces, with every content in one of its usual spellings."""
    place = len(str(pieces[0]))
    if not text.startswith(str(pieces[0])):
        return False
    for index, after in zip(pieces[1::2], pieces[2::2]):
        for written in _spellings(turns[int(index)]):
            if text.startswith(written + str(after), place):
                place += len(written) + len(str(after))
                break
        else:
            return False
    return place == len(text)


def _shortened(template: ChatTemplate, turns: Sequence[Turn], text: str, generation_prompt: bool) -> int | None:
    """The first message of which the beginning, the end or all is not in the text; None if there is none."""
    needed = {index: rest.strip() for index, turn in enumerate(turns) if (rest := _needed(turn)[1]).strip()}
    written = dict.fromkeys(needed, text)
    found = spans(template, turns, needed, text, generation_prompt)
    if found is not None:
        written = dict.fromkeys(needed, "")
        for index, begin, end in found:
            written[index] += text[begin:end]
    for place, one in written.items():
        if not one.strip():
            return place
    doubtful = [place for place, rest in needed.items() if rest not in written[place]]
    for alphabet in ALPHABETS:  # where beginning and end arrive, what lies between was rewritten
        if not doubtful:
            return None
        first, last = mark(alphabet, _PROBE), mark(alphabet, _PROBE)
        framed = [dict(turn) for turn in turns]
        for place in doubtful:
            ends = [_numbered(word, alphabet, place) for word in (first, last)]
            framed[place]["content"] = needed[place].join(ends)
        try:
            text = _write(template, framed, generation_prompt)
        except TemplateError:
            break
        found_words = _found(first, alphabet, text) | _found(last, alphabet, text)
        doubtful = [i for i in doubtful if not found_words.issuperset(_numbered(w, alphabet, i) for w in (first, last))]
    return doubtful[0] if doubtful else None


def _missing(template: ChatTemplate, turns: Sequence[Turn], index: int, what: str) -> str:
    role = turns[index]["role"]
    advice = "put it into a user message" if role == "system" else "use --no-chat, or a model with another template"
    return f"{template.title} does not write {what} of messages[{index}] ({role}): {advice}"
