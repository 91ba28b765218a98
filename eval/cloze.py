"""The task ``lean_cloze``: which of four words ends a sentence of the default corpus? Made without any download."""

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from lean.eval.corpus import python_docs

TASKS_FOLDER = Path(__file__).parent / "lm_eval_tasks"  # what lm-eval wants as --include_path
NUM_ITEMS = 200
CONTEXT_CHARS = 600  # about 150 tokens: well beyond the residual, so that quantized blocks are read
SEED = 20240229

_END = re.compile(r"(?<=[a-z] )([a-z]{4,12})\.(?=\s)")  # the last word of a sentence


def make_items(text: str, count: int = NUM_ITEMS) -> list[dict[str, Any]]:
    """Cloze items from a text; the same ones for the same text.

    A context is the text before the last word of a sentence. The three false choices end other sentences of the text,
    are not in the context, and have been drawn as often as they do so: how common a word is tells nothing.

    Returns:
        count items ``{"context", "choices" (four words), "answer" (index of the right one)}``; fewer where the text has
        not enough sentences.
    """
    rng = random.Random(SEED)
    text = re.sub(r"\s+", " ", text)
    ends = [match for match in _END.finditer(text) if match.start() > CONTEXT_CHARS]
    counts = Counter(match[1] for match in ends)
    words, weights = zip(*sorted(counts.items())) if counts else ((), ())
    items = []
    for match in rng.sample(ends, min(count, len(ends))):
        start = text.index(" ", match.start() - CONTEXT_CHARS) + 1
        context = text[start : match.start()].rstrip()
        seen = {match[1], *re.findall(r"\w+", context)}
        if len([word for word in words if word not in seen]) < 3:
            continue
        choices = [match[1]]
        while len(choices) < 4:
            (word,) = rng.choices(words, weights)
            if word not in seen:
                choices.append(word)
                seen.add(word)
        rng.shuffle(choices)
        items.append({"context": context, "choices": choices, "answer": choices.index(match[1])})
    return items


def dataset(**metadata: Any) -> dict[str, Any]:
    """The split ``test`` as lm-eval wants it; it passes what it knows about the task and the model, unused here."""
    from datasets import Dataset

    return {"test": Dataset.from_list(make_items(python_docs()))}


if __name__ == "__main__":
    print(TASKS_FOLDER)
