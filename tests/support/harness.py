"""lean and lm-eval's own ``hf`` model on the same checkpoint, and requests for both. Needs lm-eval."""

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lean.eval.harness.model import LeanLM
from lean.eval.score.continuations import score_continuations

EXACT = {"kv_dtype": "fp32", "dtype": "float32"}
PAIRS = [
    ("The lighthouse stood", " on the cliff"),
    ("The lighthouse stood", " in the town"),
    ("One answer:", " A"),
    ("One answer:", " B"),
    ("Spaces move   ", "to the answer"),
    ("", "no context at all"),
    ("x" * 300, " after a long one"),
    ("ü, then é", "ñ"),
]
DOCUMENTS = ["A short one.", "word " * 150, "z", "héllo wörld " * 120, ""]


def instances(kind, arguments, task="task"):
    return [
        Instance(kind, {}, args if isinstance(args, tuple) else (args,), 0, (task, index, 1))
        for index, args in enumerate(arguments)
    ]


def lean(source, **options):
    return LeanLM(str(source), progress=False, **{**EXACT, **options})


def hf(folder, **options):
    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4, **options)


def scored_ids(model, monkeypatch, kind, arguments):
    """The sequences that a call has the engine run, in order of the requests, and the answers."""
    seen = []

    def spy(llm, sequences):
        seen.extend(sequences)
        return score_continuations(llm, sequences)

    monkeypatch.setattr("lean.eval.score.continuations.score_continuations", spy)
    return seen, getattr(model, kind)(instances(kind, arguments))
