"""The tasks ``lean_cloze`` and ``lean_cloze_text``: choose the last word of a sentence among four, or write it.

The sentences are those of the default corpus. No download.
"""

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from lean.eval.corpus import python_docs

TASKS_FOLDER = Path(__file__).parent / "lm_eval_tasks"  # for lm-eval's --include_path
NUM_ITEMS = 200
CONTEXT_CHARS = 600  # about 150 tokens: more than the residual, so that quantized blocks are read
MIN_COUNT = 12  # occurrences of a choice in the text: frequent words are mostly one token, which lets an item run once
SEED = 20240229

_PAIR = re.compile(r"\b([a-z]+) (?=([a-z]{4,12})\b)")  # a word and the next one
_END = re.compile(r"\b([a-z]+) ([a-z]{4,12})\.(?= )")  # the last two words of a sentence


def make_items(text: str, count: int = NUM_ITEMS) -> list[dict[str, Any]]:
    """Cloze items from a text. Equal texts give equal items.

    A context is the text before the last word of a sentence. The three wrong choices follow the same word as the right
    one elsewhere in the text, and do not occur in the context. So the last word alone does not give the answer away.

    Returns:
        ``count`` items ``{"context", "choices" (four words), "answer" (index of the right one)}``; fewer for a short
        text.
    """
    rng = random.Random(SEED)
    text = re.sub(r"\s+", " ", text)
    pairs = _PAIR.findall(text)
    counts = Counter(word for _, word in pairs)
    followers: dict[str, set[str]] = {}
    for before, word in pairs:
        if counts[word] >= MIN_COUNT:
            followers.setdefault(before, set()).add(word)
    ends = [match for match in _END.finditer(text) if match.start() > CONTEXT_CHARS]
    rng.shuffle(ends)
    items: list[dict[str, Any]] = []
    for match in ends:
        before, right = match.groups()
        start = text.index(" ", match.start() - CONTEXT_CHARS) + 1
        context = text[start : match.end(1)]
        false = sorted(followers.get(before, set()) - {right, *re.findall(r"\w+", context)})
        if len(false) < 3 or counts[right] < MIN_COUNT or len(items) == count:
            continue
        choices = [right, *rng.sample(false, 3)]
        rng.shuffle(choices)
        items.append({"context": context, "choices": choices, "answer": choices.index(right)})
    return items


def dataset(**metadata: Any) -> dict[str, Any]:
    """The split ``test`` for lm-eval. ``metadata`` of the task and the model is unused."""
    from datasets import Dataset

    return {"test": Dataset.from_list(make_items(python_docs()))}


if __name__ == "__main__":
    print(TASKS_FOLDER)
