"""docs/models.md: the results of the census as a page."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import census_models
from census_check import LENGTH, SINKS, WINDOW, Row

PATH = Path(__file__).resolve().parents[2] / "docs" / "models.md"

_INTRODUCTION = """\
# Models

Which text decoders of transformers {version} lean serves. The type of a model is `model_type` in its `config.json`.

Every type of transformers' `MODEL_FOR_CAUSAL_LM_MAPPING` is built small, with random weights. What is special about a
type is kept: layer patterns, shared KV, layers without rotation, experts, soft caps, sink logits, partial rotation.

| result | meaning |
|---|---|
| served | the same numbers as transformers' eager attention, see below |
| refused | one line says why, before weights are read |
| refused late | one line says why, but weights were read before |
| wrong, traceback | a fault of lean |
| not run | transformers itself cannot build or run the small model |

**Served** means: over an exact cache the logits of {length} tokens, in one shot, and those of three packed sequences in
chunks of 16 differ from transformers by at most 1e-4 of their standard deviation, or 1e-5 where that is larger. Greedy
answers are the same, alone and in a batch. An int8 cache gives finite numbers. Where the difference is larger, but at
most four times the error that transformers itself makes in float32, both are compared in float64.

The column `--window` tells the same of `--window {window} --sinks {sinks}`. Served there means: with 0 sinks the logits
are those of transformers under the same mask, and with {sinks} sinks those of the first {seen} tokens, which see all,
have not changed. A window is refused after weights are read: lean tries whether queries can be rotated back.

    make census                                   # every type: 5 to 20 minutes
    make census CENSUS="--types falcon gpt_neo"   # some types
    make census CENSUS=--write                    # every type, and this page
"""


def _state(row: Row) -> str:
    return "refused late" if row.state == "refused" and row.late else row.state


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _error(row: Row) -> str:
    """The error in standard deviations of the logits."""
    if row.error is None or not row.spread:
        return ""
    return f"{row.error / row.spread:.0e}" + (" (float64)" if row.dtype == "float64" else "")


def _why(row: Row) -> str:
    by = {"transformers: ": row.transformers, "": row.why, "`--window`: ": row.window_why}
    reasons = [prefix + reason for prefix, reason in by.items() if reason]
    return "; ".join(map(_cell, reasons))


def _table(rows: Iterable[Row]) -> Iterator[str]:
    yield "| type | lean | largest error | `--window` | why not |"
    yield "|---|---|---|---|---|"
    for row in rows:
        cells = (f"`{row.name}`", _state(row), _error(row), row.window, _why(row))
        yield "| " + " | ".join(cells) + " |"


def counts(rows: Iterable[Row]) -> Iterator[str]:
    """Lines of a table that counts the states of the text decoders, the variants and the other types."""
    parts = sections(rows)
    states = ("served", "refused", "refused late", "wrong", "traceback", "not run")
    yield f"| | {' | '.join(parts)} |"
    yield "|---" * (len(parts) + 1) + "|"
    found = [Counter(map(_state, part)) for part in parts.values()]
    windows = [Counter(row.window for row in part if row.window) for part in parts.values()]
    for state in states:
        yield f"| {state} | {' | '.join(str(count[state]) for count in found)} |"
    for state in ("served", "refused", "wrong", "traceback"):
        yield f"| with a window: {state} | {' | '.join(str(count[state]) for count in windows)} |"
    yield f"| all | {' | '.join(str(len(part)) for part in parts.values())} |"


def sections(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Title -> rows, sorted by name."""
    parts: dict[str, list[Row]] = {"text decoders": [], "variants": [], "other types": []}
    asides = census_models.asides()
    for row in sorted(rows, key=lambda row: row.name):
        title = "variants" if "+" in row.name else "other types" if row.name in asides else "text decoders"
        parts[title].append(row)
    return parts


_ABOUT = {
    "text decoders": "",
    "variants": "Other settings of some types: `tests/support/census.yaml` lists them.",
    "other types": "Encoders with a head of language models, run as decoders, and halves of models that read something "
    "else than text.",
}


def page(rows: Iterable[Row], version: str) -> str:
    """The page. ``version``: of transformers."""
    rows = list(rows)
    lengths = {"length": LENGTH, "window": WINDOW, "sinks": SINKS, "seen": WINDOW + SINKS}
    lines = [_INTRODUCTION.format(version=version, **lengths), *counts(rows)]
    for title, part in sections(rows).items():
        about = [_ABOUT[title], ""] if _ABOUT[title] else []
        lines += ["", f"## {title.capitalize()}", "", *about, *_table(part)]
    return "\n".join(lines) + "\n"


def version_of(text: str) -> str:
    """The version of transformers that a page is about."""
    found = re.search(r"of transformers (\S+) lean serves", text)
    return found[1] if found else ""


def states_of(text: str) -> Mapping[str, tuple[str, str]]:
    """Name -> (state, state with a window) of every row of a page."""
    rows = re.findall(r"(?m)^\| `(\S+)` \| ([\w ]*) \| [^|]* \| (\w*) \|", text)
    return {name: (state, window) for name, state, window in rows}
