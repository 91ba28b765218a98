"""Needle in a haystack: a line hidden in a long text, and a question about it. It shows what a cache loses.

After https://github.com/gkamradt/LLMTest_NeedleInAHaystack, but every prompt has another key and value, and the answer
is begun for the model, as in RULER (arXiv:2404.06654). So the test measures whether the model can still read the value,
not how it words its answer.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

from lean.errors import RequestError
from lean.eval.decoding import raise_failed
from lean.eval.pictures import require_matplotlib, save_picture
from lean.llm import LLM
from lean.sampling_params import SamplingParams
from lean.text.prompt import encode_prompt

ANSWER_TOKENS = 12
"""Enough for a space, five digits, and the character that ends the number, one token each."""

# The answer is a copy from the prompt, which a repetition penalty among the model's defaults would suppress.
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, repetition_penalty=1.0)

COLOURS = ["amber", "black", "blue", "brown", "copper", "golden", "green", "orange", "pink", "purple", "red", "white"]
THINGS = ["anchor", "balloon", "basket", "bridge", "candle", "drum", "guitar", "ladder", "lantern", "piano", "vault"]
ITEMS = [f"{colour} {thing}" for colour, thing in product(COLOURS, THINGS)]

_SENTENCE_END = re.compile(r"\n\s*\n|(?<=[.!?])\s+|(?<=[。！？])")
_BREAK = "\n\n"


@dataclass(frozen=True)
class Needle:
    """A key, ``item``, and the value that the question asks for."""

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
        """Whether the answer contains the value, and not as part of a longer number."""
        return re.search(rf"(?<!\d)(?<!\d[.,]){self.value}(?![.,]?\d)", answer) is not None


@dataclass(frozen=True)
class NeedleCell:
    """Needles found at one depth, in percent of the text before the needle, and one prompt length."""

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

        The plain sqrt(p (1 - p) / n) would be 0 where all or no needles were found, which few trials cannot justify.
        """
        n, p = self.trials, self.accuracy
        return (p * (1 - p) / n + 1 / (4 * n * n)) ** 0.5 / (1 + 1 / n)


class Place(NamedTuple):
    """A place in a text, counted in characters from its end: where the text before it ends, and the text after begins.

    White space between sentences lies between the two.
    """

    gap: int
    after: int


class Haystack:
    """A text to hide needles in. A short text is repeated.

    Raises:
        RequestError: the text is empty, or contains every number of five digits.
    """

    def __init__(self, text: str) -> None:
        if not text.strip():
            raise RequestError("the text to hide needles in is empty: give some text")
        self._text = text.rstrip() + _BREAK
        self._ends = [match.start() for match in _SENTENCE_END.finditer(self._text)]
        taken = set(re.findall(r"(?=(\d{5}))", text))
        self._values = [value for value in map(str, range(10_000, 100_000)) if value not in taken]
        if not self._values:
            raise RequestError("the text to hide needles in contains every number of five digits: give another text")

    def draw(self, seed: int, length: int, depth: float, trial: int) -> tuple[Needle, int]:
        """A needle, and the offset in the text where its haystack ends. Equal arguments give equal results.

        The trials of a cell have different items. More trials do not change the first ones.
        """
        cell = f"{seed} {length} {depth:g}"
        items = ITEMS.copy()
        random.Random(cell).shuffle(items)  # a string seed does not depend on PYTHONHASHSEED
        chance = random.Random(f"{cell} {trial}")
        return Needle(items[trial], chance.choice(self._values)), chance.choice(self._ends)

    def place(self, size: int, end: int, depth: float) -> Place | None:
        """Where a line goes in the ``size`` characters that end at the offset ``end``; None: before them.

        The line goes to the sentence end nearest to ``depth`` percent. It goes to exactly ``depth`` percent where no
        sentence ends within a tenth of the text, and for the depths 0 and 100.
        """
        if depth == 0:
            return None
        exact = round(size * depth / 100)
        ends = _SENTENCE_END.finditer(self._last(size, end))
        near = min(ends, key=lambda match: abs(match.start() - exact), default=None)
        if depth == 100 or near is None or abs(near.start() - exact) > size / 10:
            return Place(size - exact, size - exact)
        return Place(size - near.start(), size - near.end())

    def with_line(self, line: str, size: int, end: int, place: Place | None) -> str:
        """``size`` characters of the text, which end at the offset ``end``, with a line at a place in them."""
        gap, after = (size, size) if place is None else place
        hay = self._last(size - after + gap, end)
        parts = hay[: size - after], line, hay[len(hay) - after :]
        return _BREAK.join(part for part in parts if part)

    def _last(self, size: int, end: int) -> str:
        """The ``size`` characters that end at the offset ``end`` of the repeated text."""
        whole = self._text * (size // len(self._text) + 1) + self._text[:end]
        return whole[len(whole) - size :]


Encode = Callable[[int, int], list[int]]
"""(characters of text around the needle, size of the text for which its place was chosen) -> the whole prompt's ids."""


def _hidden(
    tokenizer: Any, hay: Haystack, length: int, depth: float, trial: int, seed: int, chat: bool | None
) -> tuple[Needle, Encode]:
    """The needle of a trial and the encoder of its prompt. Raises RequestError where ``length`` is too short."""
    needle, end = hay.draw(seed, length, depth, trial)
    template = chat or (chat is None and bool(getattr(tokenizer, "chat_template", None)))

    def encode(size: int, placed: int) -> list[int]:
        text = hay.with_line(needle.line, size, end, hay.place(placed, end, depth))
        asked = f"{text}{_BREAK}{needle.question}"
        if not template:
            return encode_prompt(tokenizer, f"{asked}{_BREAK}{needle.answer_start}", chat=False)
        start = tokenizer(needle.answer_start, add_special_tokens=False)["input_ids"]
        return [*encode_prompt(tokenizer, asked, chat=True), *start]

    least = len(encode(0, 0))
    if least > length:
        raise RequestError(
            f"length {length} cannot hold a needle and its question, which need {least} tokens: raise the length"
        )
    return needle, encode


def _longest(encode: Encode, length: int) -> list[int]:
    """The longest prompt of at most ``length`` tokens, or one that a few characters more would make longer than that.

    The place of the needle depends on the size of the text, and white space at that place is left out. So the number of
    tokens may fall while the text grows. A second search starts from the size that the first one found, and keeps the
    needle at its place there: every character more then adds tokens, but for the merges at the beginning of the text.
    """
    placed, _ = _search(lambda size: encode(size, size), 0, length)
    return _search(lambda size: encode(size, placed), placed, length)[1]


def _search(encode: Callable[[int], list[int]], low: int, length: int) -> tuple[int, list[int]]:
    """The largest size that the search finds whose prompt has at most ``length`` tokens, as that of ``low``; its ids.

    Where the number of tokens does not fall while the text grows, it is the largest there is, or one that gives
    ``length - 1`` tokens. Raises RequestError for a text that gives no tokens.
    """
    best, high, most = encode(low), low + 4 * length, 1000 * (low + length)
    while len(beyond := encode(high)) <= length:
        if high > most:
            raise RequestError("the tokenizer makes too few tokens of the text to hide needles in: give another text")
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
    return low, best


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
    """Hide needles in a text and ask for them: one cell for every length and depth, in this order.

    The prompts of a cell run in one batch with greedy answers. A deterministic engine gives the same answers in every
    batch. One seed gives the same prompts for every engine with the same tokenizer.

    Args:
        lengths: tokens of the whole prompts.
        depths: position of the needle in percent of the text; 100 is right before the question.
        chat: whether to ask in the model's chat template; None: where the model has one.
        progress: called after every cell with its number of prompts.

    Raises:
        RequestError: before anything runs: a length that is too long for the engine or too short for a needle, a depth
            outside 0 to 100, or an unusable text.
        EngineError: a request failed.
    """
    hay, tokenizer = Haystack(text), llm.model.tokenizer
    if not lengths or not depths:
        raise RequestError("a needle test needs at least one length and one depth: give --lengths and --depths")
    if not 1 <= trials <= len(ITEMS):
        raise RequestError(f"trials must be from 1 to {len(ITEMS)}, got {trials}")
    for depth in depths:
        if not 0 <= depth <= 100:
            raise RequestError(f"depth must be a percentage from 0 to 100, got {depth}")
    limit = llm.size.max_model_len - ANSWER_TOKENS
    if max(lengths) > limit:
        raise RequestError(
            f"length {max(lengths)} plus {ANSWER_TOKENS} answer tokens exceeds max-model-len "
            f"{llm.size.max_model_len}: use lengths of at most {limit}"
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
        raise_failed(outputs)
        found = sum(needle.found_in(output.text) for (needle, _), output in zip(trials, outputs, strict=True))
        if progress:
            progress(len(trials))
        yield NeedleCell(length, depth, found, len(trials))


def needle_report(cells: Iterable[NeedleCell]) -> dict[str, Any]:
    """The cells, at least one, and their sum, ready for JSON."""
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
    """Lengths, depths, and the cells by (depth, length); cells that have not run are missing."""
    found = {(cell.depth, cell.length): cell for cell in cells}
    return sorted({length for _, length in found}), sorted({depth for depth, _ in found}), found


def print_map(cells: Iterable[NeedleCell], title: str) -> None:
    """Print the needles found as a table: a row for every depth, a column for every length."""
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
    """The share of needles found as a PNG, white where nothing ran. Needs the extra ``eval``."""
    require_matplotlib("the needle map")
    from matplotlib.figure import Figure

    lengths, depths, found = _grid(cells)
    size = max(4.0, 1.6 + 0.9 * len(lengths)), max(2.4, 1.3 + 0.5 * len(depths))
    figure = Figure(figsize=size, layout="constrained")
    axis = figure.subplots()
    nothing = float("nan")
    values = [[found[d, n].accuracy if (d, n) in found else nothing for n in lengths] for d in depths]
    image = axis.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")  # readable with any colour vision
    for (row, depth), (column, length) in product(enumerate(depths), enumerate(lengths)):
        if cell := found.get((depth, length)):
            ink = "black" if cell.accuracy >= 0.5 else "white"
            axis.text(column, row, f"{cell.accuracy:.0%}", ha="center", va="center", color=ink)
    axis.set_title(title, wrap=True, parse_math=False)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:g}%" for depth in depths])
    axis.set(xlabel="prompt length, tokens", ylabel="needle depth")
    figure.colorbar(image, label="needles found", format=lambda share, _: f"{share:.0%}", ticks=[0, 0.25, 0.5, 0.75, 1])
    save_picture(figure, str(file), dpi=120)
