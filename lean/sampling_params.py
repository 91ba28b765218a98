"""SamplingParams: how an answer is generated, and when it ends."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lean.config import DEFAULT_MAX_TOKENS
from lean.errors import RequestError, shown

MOST_ANSWERS = 2**16  # to one prompt


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. None: the value of the model's ``generation_config.json``, else off.

    Attributes:
        max_tokens: most tokens to generate; fewer if the sequence reaches max_model_len.
        min_tokens: before this many tokens neither end-of-sequence nor stop_token_ids are drawn.
        n: number of answers to the prompt, each with its own random numbers.
        logit_bias: token id -> number added to its logit, -100 to 100. Ids may be strings of digits, as in JSON.
        repetition_penalty: positive logits of tokens in the prompt or the answer are divided by it, negative ones
            multiplied (arXiv:1909.05858); 1 is off.
        presence_penalty: subtracted from the logits of tokens in the answer, -2 to 2.
        frequency_penalty: subtracted once for each time a token is in the answer, -2 to 2.
        temperature: divides the logits. 0 is greedy (the lowest id wins ties); the four fields below are then unused.
        top_k: sample from the k most likely tokens and all ties of the k-th; 0 is off.
        top_p: sample from the smallest set of tokens whose total probability reaches top_p; 1 is off.
        min_p: drop tokens whose probability is below min_p times that of the most likely token; 0 is off.
        seed: the same seed gives the same random numbers, independent of other requests; None: a random seed. See
            `lean.engine.sampler.Sampler`.
        stop: text that ends the answer and is not part of it; kept as a tuple.
        stop_token_ids: tokens that end the answer as end-of-sequence does; kept as a tuple.
        ignore_eos: continue after end-of-sequence tokens.
        logprobs: report the log-probability of each token, and of this number of most likely tokens; None: no report.
        prompt_logprobs: the same for the tokens of the prompt.

    Fields that change the logits are applied in the order above, from logit_bias to min_p. Log-probabilities are those
    of the model, before any change.

    Raises:
        RequestError: a value is not allowed; the message names the field.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool = False
    n: int = 1
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    min_tokens: int = 0

    def __post_init__(self) -> None:
        def need(name: str, ok: bool, what: str) -> None:
            if not ok:
                raise RequestError(f"{name.replace('_', '-')} must be {what}, got {shown(getattr(self, name))}")

        def need_count(name: str, least: int) -> None:
            need(name, _whole(getattr(self, name), least), f"a whole number of at least {least}")

        need_count("max_tokens", 1)
        need_count("min_tokens", 0)
        need("min_tokens", self.min_tokens <= self.max_tokens, f"at most max-tokens, {self.max_tokens}")
        need("n", _whole(self.n, 1) and self.n <= MOST_ANSWERS, f"a whole number from 1 to {MOST_ANSWERS}")
        for name in ("top_k", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                need_count(name, 0)
        t, p, m, r, seed = self.temperature, self.top_p, self.min_p, self.repetition_penalty, self.seed
        need("temperature", t is None or (_real(t) and t >= 0), "a finite number of at least 0")
        need("top_p", p is None or (_real(p) and 0 < p <= 1), "above 0 and at most 1")
        need("min_p", m is None or (_real(m) and 0 <= m <= 1), "from 0 to 1")
        need("repetition_penalty", r is None or (_real(r) and r > 0), "a finite number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            need(name, _real(getattr(self, name)) and abs(getattr(self, name)) <= 2, "from -2 to 2")
        need("seed", seed is None or (_whole(seed) and seed < 2**63), "a whole number from 0 to 2^63 - 1")
        need("ignore_eos", isinstance(self.ignore_eos, bool), "true or false")

        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        texts = _listed(stop) and all(isinstance(text, str) and text for text in stop)
        need("stop", texts, "a string or a list of strings, none of them empty")
        ids = self.stop_token_ids
        need("stop_token_ids", _listed(ids) and all(map(_whole, ids)), "a list of token ids")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        if self.logit_bias is not None:
            need("logit_bias", isinstance(self.logit_bias, Mapping), "a mapping of token ids to numbers")
            object.__setattr__(self, "logit_bias", _read_bias(self.logit_bias))


def _whole(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _real(value: object) -> bool:
    """Whether a value is a finite number within the range of a float."""
    limit = sys.float_info.max
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -limit <= value <= limit


def _listed(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _read_bias(given: Mapping) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        if not _whole(token):
            raise RequestError(f"logit-bias must have token ids as keys, got {shown(key)}")
        if token in bias:
            raise RequestError(f"logit-bias must name each token once, got {shown(key)} twice")
        if not (_real(value) and abs(value) <= 100):
            raise RequestError(f"logit-bias must be from -100 to 100, got {shown(value)} for token {shown(key)}")
        bias[token] = float(value)
    return bias
