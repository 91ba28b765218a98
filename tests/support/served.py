"""What lean does with a model: it answers, or it refuses the model in one line. Anything else is a fault."""

import time
from dataclasses import dataclass
from pathlib import Path

from lean import LLM, EngineConfig, LeanError, SamplingParams

CONFIG = EngineConfig(kv_dtype="int8", num_blocks=8, max_model_len=64, max_num_seqs=1)
PARAMS = SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=0, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Outcome:
    """``answer``: ids and log-probabilities of prompt and answer; None if refused. ``text``: the answer or refusal."""

    answer: tuple | None
    text: str
    seconds: float


def outcome(model: Path) -> Outcome:
    """Load a model and generate three tokens. Raises AssertionError for a refusal that is not one line of plain text,
    and whatever else lean raises."""
    began = time.perf_counter()
    try:
        llm = LLM(str(model), CONFIG)
        (output,) = llm.generate("ab 1\n", PARAMS)
        numbers = [entry.logprob for entry in [*(output.prompt_logprobs or [])[1:], *(output.logprobs or [])]]
        answer, text = (tuple(output.token_ids), tuple(numbers)), output.error or output.text
    except LeanError as error:
        answer, text = None, str(error)
        assert text
        assert len(text) <= 1000, f"too long: {text:.1200}"
        assert text.isprintable(), f"not one line of text: {text!r}"
    return Outcome(answer, text, time.perf_counter() - began)
