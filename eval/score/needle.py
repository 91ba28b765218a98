"""What does a window forget, or a format blur? A line hidden in a long text, and a question that asks for it.

The needle in a haystack (https://github.com/gkamradt/LLMTest_NeedleInAHaystack) with a key and a value of its own for
every prompt, and the beginning of the answer given, as in RULER (arXiv:2404.06654): what is tried is whether the value
can still be read, not how a model words its answers.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from lean.errors import EngineError, LeanError, RequestError
from lean.llm import LLM
from lean.sampling_params import SamplingParams
from lean.text.prompt import encode_prompt

ANSWER_TOKENS = 12
"""Enough for a space, five digits and what shows that no sixth follows, one token each."""

# Copying is what is asked for: a penalty among the model's own defaults would forbid it.
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, repetition_penalty=1.0)

COLOURS = ["amber", "black", "blue", "brown", "copper", "golden", "green", "orange", "pink", "purple", "red", "white"]
THINGS = ["anchor", "balloon", "basket", "bridge", "candle", "drum", "guitar", "ladder", "lantern", "piano", "vault"]
ITEMS = [f"{colour} {thing}" for colour, thing in product(COLOURS, THINGS)]

_SENTENCE_END = re.compile(r"\n\s*\n|(?<=[.!?])\s+|(?<=[。！？])")
_BREAK = "\n\n"


@dataclass(frozen=True)
class Needle:
    """A key, and the value that is asked for."""

    item: str
    value: str

    @property
    def line(self) -> str:
        return f"{self.answer_start} {self.value}. Remember it: the {self.item} has the access code {self.value}."

    @property
    def question(self) -> str:
        return f"What is the access code for the {self.item}? The text above says it."

    @property
    def answer_start(self) -> str:
        return f"The access code for the {self.item} is"

    def found_in(self, answer: str) -> bool:
        """Whether the answer has the value as a number of its own, not as a part of a longer one."""
        return re.search(rf"(?<!\d)(?<!\d[.,]){self.value}(?![.,]?\d)", answer) is not None


@dataclass(frozen=True)
class NeedleCell:
    """How many of the needles at one depth (percent of the text before them) of one prompt length were found."""

    length: int
    depth: float
    correct: int
    trials: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.trials

    @property
    def stderr(self) -> float:
        """Half of Wilson's score interval at one standard deviation (Wilson 1927, doi:10.2307/2276774).

        The plain sqrt(p (1 - p) / n) is 0 where all or none were found, which few trials cannot know.
        """
        n, p = self.trials, self.accuracy
        return (p * (1 - p) / n + 1 / (4 * n * n)) ** 0.5 / (1 + 1 / n)


class Haystack:
    """A text to hide needles in, repeated where it is too short.

    Raises:
        RequestError: it is empty, or has every number of five digits.
    """

    def __init__(self, text: str) -> None:
        if not text.strip():
            raise RequestError("the text to hide needles in is empty: give some text")
        self._text = text.rstrip() + _BREAK
        self._ends = [match.start() for match in _SENTENCE_END.finditer(self._text)]
        taken = set(re.findall(r"(?=(\d{5}))", text))
        self._values = [value for value in map(str, range(10_000, 100_000)) if value not in taken]
        if not self._values:
            raise RequestError("the text to hide needles in has every number of five digits: give another one")

    def draw(self, seed: int, length: int, depth: float, trial: int) -> tuple[Needle, int]:
        """A needle, and the offset in the text at which its haystack ends: always the same for the same arguments.

        The trials of a cell have different items, and do not change when there are more of them.
        """
        cell = f"{seed} {length} {depth:g}"
        items = ITEMS.copy()
        random.Random(cell).shuffle(items)  # seeded by the characters, not by their hash
        chance = random.Random(f"{cell} {trial}")
        return Needle(items[trial], chance.choice(self._values)), chance.choice(self._ends)

    def with_line(self, line: str, size: int, end: int, depth: float) -> str:
        """The ``size`` characters that end at the offset ``end``, with a line between two of their sentences.

        It goes to the sentence end inside that is nearest to ``depth`` percent; exactly there if none is within a
        tenth of the text, and at 0 and 100.
        """
        whole = self._text * (size // len(self._text) + 1) + self._text[:end]
        hay = whole[len(whole) - size :]
        exact = round(size * depth / 100)
        ends = (match.start() for match in _SENTENCE_END.finditer(hay))
        at = min(ends, key=lambda place: abs(place - exact), default=exact)
        if depth in (0, 100) or abs(at - exact) > size / 10:
            at = exact
        parts = hay[:at].strip("\n"), line, hay[at:].strip()
        return _BREAK.join(part for part in parts if part)


Encode = Callable[[int], list[int]]  # characters of text around the needle -> token ids of the whole prompt


def _hidden(
    tokenizer: Any, hay: Haystack, length: int, depth: float, trial: int, seed: int, chat: bool | None
) -> tuple[Needle, Encode]:
    """The needle of a trial and how to ask for it; RequestError if ``length`` has no room even for that."""
    needle, end = hay.draw(seed, length, depth, trial)
    template = chat or (chat is None and bool(getattr(tokenizer, "chat_template", None)))

    def encode(size: int) -> list[int]:
        asked = f"{hay.with_line(needle.line, size, end, depth)}{_BREAK}{needle.question}"
        if not template:
            return encode_prompt(tokenizer, f"{asked}{_BREAK}{needle.answer_start}", chat=False)
        start = tokenizer(needle.answer_start, add_special_tokens=False)["input_ids"]
        return [*encode_prompt(tokenizer, asked, chat=True), *start]

    least = len(encode(0))
    if least > length:
        raise RequestError(f"length {length} cannot hold a needle and its question: they alone need {least} tokens")
    return needle, encode


def _longest(encode: Encode, length: int) -> list[int]:
    """The prompt with the most characters that has at most ``length`` tokens; one token less is good enough.

    Whole prompts are tried, since tokens grow with characters nearly but not strictly: merges change at the cuts, and
    white space beside the needle goes.
    """
    low, best, high = 0, encode(0), 4 * length
    while len(beyond := encode(high)) <= length:
        low, best, high = high, beyond, 2 * high
    halve = False
    while high - low > 1 and len(best) < length - 1:
        share = 0.5 if halve else (length - len(best)) / (len(beyond) - len(best))
        size = min(max(low + int((high - low) * share), low + 1), high - 1)
        ids = encode(size)
        if len(ids) <= length:
            low, best = size, ids
        else:
            high, beyond = size, ids
        halve = not halve
    return best


def run_needle(
    llm: LLM,
    text: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    trials: int = 4,
    seed: int = 0,
    chat: bool | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[NeedleCell]:
    """Hide needles in a text and ask for them; one cell for every length and depth, in this order.

    The prompts of a cell run together. Their answers are greedy; with a deterministic engine they do not depend on the
    company. The same seed asks the same of every engine with the same tokenizer.

    Args:
        lengths: tokens of the prompts, everything included.
        depths: where the needle is, in percent of the text; 100 is right before the question.
        chat: ask in the model's chat template; None does where there is one.
        progress: told after every cell how many more prompts have been answered.

    Raises:
        RequestError: before anything runs: lengths that the engine cannot serve or that hold no needle, depths that
            are none, a text that cannot be used.
        EngineError: the model computed non-finite numbers.
    """
    hay, tokenizer = Haystack(text), llm.model.tokenizer
    if not lengths or not depths:
        raise RequestError("a needle test needs at least one length and one depth")
    if not 1 <= trials <= len(ITEMS):
        raise RequestError(f"trials must be from 1 to {len(ITEMS)}, got {trials}")
    for depth in depths:
        if not 0 <= depth <= 100:
            raise RequestError(f"a depth is a percentage from 0 to 100, got {depth}")
    limit = llm.size.max_model_len - ANSWER_TOKENS
    if max(lengths) > limit:
        raise RequestError(
            f"length {max(lengths)} and {ANSWER_TOKENS} tokens of answer exceed max-model-len "
            f"{llm.size.max_model_len}: ask for at most {limit}, or raise --max-model-len or --kv-memory"
        )
    cells = list(product(lengths, depths))
    hidden = [
        [_hidden(tokenizer, hay, length, depth, trial, seed, chat) for trial in range(trials)]
        for length, depth in cells
    ]
    return _run(llm, cells, hidden, progress)


def _run(
    llm: LLM,
    cells: list[tuple[int, float]],
    hidden: list[list[tuple[Needle, Encode]]],
    progress: Callable[[int], None] | None,
) -> Iterator[NeedleCell]:
    for (length, depth), trials in zip(cells, hidden):
        outputs = llm.generate([_longest(encode, length) for _, encode in trials], GREEDY)
        for output in outputs:
            if output.finish_reason in ("error", "abort"):
                raise EngineError(output.error or "the request was aborted")
        found = sum(needle.found_in(output.text) for (needle, _), output in zip(trials, outputs, strict=True))
        if progress:
            progress(len(trials))
        yield NeedleCell(length, depth, found, len(trials))


def needle_report(cells: Iterable[NeedleCell]) -> dict[str, Any]:
    """The cells, at least one, and all of them together, for JSON."""
    cells = list(cells)
    whole = NeedleCell(0, 0, sum(cell.correct for cell in cells), sum(cell.trials for cell in cells))
    return {
        "accuracy": whole.accuracy,
        "stderr": whole.stderr,
        "correct": whole.correct,
        "trials": whole.trials,
        "cells": [asdict(cell) | {"accuracy": cell.accuracy, "stderr": cell.stderr} for cell in cells],
    }


def _grid(cells: Iterable[NeedleCell]) -> tuple[list[int], list[float], dict[tuple[float, int], NeedleCell]]:
    """Lengths, depths, and the cells by (depth, length); some may not have run yet."""
    found = {(cell.depth, cell.length): cell for cell in cells}
    return sorted({length for _, length in found}), sorted({depth for depth, _ in found}), found


def print_map(cells: Iterable[NeedleCell], title: str) -> None:
    """Needles found, as a table on stdout: a row for every depth, a column for every length."""
    from rich.console import Console
    from rich.table import Table

    lengths, depths, found = _grid(cells)
    console = Console(highlight=False, markup=False)
    table = Table("depth", title=title)
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    for depth in depths:
        row = (found.get((depth, length)) for length in lengths)
        table.add_row(f"{depth:g}%", *(f"{cell.correct}/{cell.trials}" if cell else "" for cell in row))
    console.print(table)


def draw_map(cells: Iterable[NeedleCell], file: str, title: str) -> None:
    """The same as a picture (PNG): the share of needles found, white where nothing ran. Needs the extra ``eval``."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LeanError("the needle map needs matplotlib: pip install 'lean-inference[eval]'") from None

    lengths, depths, found = _grid(cells)
    size = max(4.0, 1.6 + 0.9 * len(lengths)), max(2.4, 1.3 + 0.5 * len(depths))
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    nothing = float("nan")
    values = [[found[d, n].accuracy if (d, n) in found else nothing for n in lengths] for d in depths]
    image = axis.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")  # for every kind of colour vision
    for (row, depth), (column, length) in product(enumerate(depths), enumerate(lengths)):
        if cell := found.get((depth, length)):
            ink = "black" if cell.accuracy >= 0.5 else "white"
            axis.text(column, row, f"{cell.accuracy:.0%}", ha="center", va="center", color=ink)
    axis.set_title(title, wrap=True, parse_math=False)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:g}%" for depth in depths])
    axis.set(xlabel="prompt, tokens", ylabel="depth of the needle")
    figure.colorbar(image, label="needles found", format=lambda share, _: f"{share:.0%}", ticks=[0, 0.25, 0.5, 0.75, 1])
    figure.savefig(file, dpi=120)
