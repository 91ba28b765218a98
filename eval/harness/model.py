"""lean as a model of lm-evaluation-harness: every likelihood and every text is read through lean's cache.

Importing this module registers the model ``lean`` with lm-eval (https://github.com/EleutherAI/lm-evaluation-harness).
lm-eval 0.4 has no plugins, so something must import this module: `python -m lean.eval.tasks` is the ``lm_eval`` command
with lean registered.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from lean.config import DEFAULT_MAX_TOKENS, DEFAULT_MODEL
from lean.engine.request import read_token_ids
from lean.errors import ConfigError, LeanError, RequestError, one_line
from lean.eval.harness.answers import Answers
from lean.eval.harness.args import engine_config, sampling_params
from lean.eval.harness.faults import Faults
from lean.eval.harness.texts import Job, generate_texts
from lean.eval.harness.truncation import Truncation
from lean.eval.score.continuations import score_each
from lean.llm import LLM
from lean.report import kv_report
from lean.text.contents import check_arrival, write, write_open
from lean.text.prompt import token_ids
from lean.text.template import TemplateRefusal, has_template, template_of

log = logging.getLogger("lean")

FAILED = (-math.inf, False)  # of a continuation that cannot be scored: it is never the likeliest
# Requests run in parts of at least _PART, and of at least _PART_BATCHES batches: the last batch of a part may be small.
_PART, _PART_BATCHES = 256, 16


@register_model("lean")
class LeanLM(TemplateLM):
    """A lean engine as a model for lm-eval: it gives likelihoods and texts.

    The boundary between context and continuation is lm-eval's: both are tokenized as one text, and spaces at the end of
    the context belong to the continuation. Sequences that are too long lose tokens on the left, see `truncated`.

    BOS: a context has at most one, added by the tokenizer or spelled in its text; with Gemma always. An empty context
    becomes the prefix token. A document of `loglikelihood_rolling` follows one prefix token, which is not scored; the
    later windows of a long document begin with its own tokens. lm-eval's ``hf`` model scores a second BOS there with
    tokenizers that add one, and agrees with lean for ``add_bos_token=False``.

    A request that cannot be run does not end the others: its likelihood is minus infinity, its text empty, and `faults`
    counts it. `answers` has every answer as soon as it is there.

    Args:
        pretrained: an LLM, or a model as for `LLM`.
        max_gen_toks: most new tokens for tasks that set no limit.
        add_bos_token: whether a context begins with BOS; None: as the tokenizer does.
        prefix_token_id: the token before an empty context; None: BOS, else EOS.
        batch_size, max_batch_size: of lm-eval; unused, since the engine batches up to `max_num_seqs` requests.
        progress: show progress bars on stderr.
        options: fields of EngineConfig.

    Raises:
        UserError: the model or an argument cannot be used.
    """

    def __init__(
        self,
        pretrained: str | LLM = DEFAULT_MODEL,
        *,
        max_gen_toks: int | str = DEFAULT_MAX_TOKENS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(pretrained, LLM):
            if options:
                raise ConfigError(
                    f"{', '.join(options)}: an LLM that already exists cannot be configured; set its options first"
                )
            self.llm = pretrained
        else:
            self.llm = LLM(str(pretrained), engine_config(options), progress=progress)
        self.tokenizer = self.llm.model.tokenizer
        self._progress = progress
        self._max_gen_toks = int(max_gen_toks)
        if add_bos_token is None and "gemma" in self.llm.model.info.config.model_type:
            add_bos_token = True  # Gemma's likelihoods are meaningless without BOS
        self.add_bos_token = add_bos_token
        prefix = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        given = [int(token) for token in prefix if token is not None]
        if not given:
            raise ConfigError("the tokenizer has neither BOS nor EOS: give prefix_token_id, the token to begin with")
        self._prefix_token_id = given[0]
        self.tokens_scored = 0
        self._truncation = Truncation()
        self.faults, self.answers = Faults(), Answers()
        if batch_size not in (None, 1, "1", "auto"):
            log.warning("batch_size %s has no effect: set max_num_seqs, the most requests at once", batch_size)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "LeanLM":
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict | None = None) -> "LeanLM":
        """From lm-eval's flags, overridden by model arguments. lm-eval's default ``--device cuda:0`` means auto."""
        flags = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if flags.get("device") == "cuda:0":
            del flags["device"]
        return cls(**(flags | arg_dict))

    # --- facts about the model ---

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self._prefix_token_id

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens; unlimited if every layer has a window."""
        return self.llm.size.max_model_len

    @property
    def max_gen_toks(self) -> int:
        return self._max_gen_toks

    @property
    def batch_size(self) -> int:
        return self.llm.config.max_num_seqs

    @property
    def device(self) -> torch.device:
        return self.llm.model.device

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    @property
    def bos_rule(self) -> str:
        """The first token of sequences, in words."""
        prefix = self.tokenizer.decode([self.prefix_token_id])
        when = {None: "as the tokenizer adds it", True: "always", False: "never"}[self.add_bos_token]
        return f"contexts: BOS {when}; empty contexts and the first window of rolling documents: {prefix}, not scored"

    def get_model_info(self) -> dict[str, Any]:
        """Facts that lm-eval saves with its results: engine options, cache, BOS rule, tokens scored and cut."""
        return {
            "model_name": self.llm.model.info.source.name,
            "model_dtype": str(self.llm.model.info.dtype).removeprefix("torch."),
            "engine": asdict(self.llm.config),
            "kv": kv_report(self.llm),
            "bos": self.bos_rule,
            "tokens_scored": self.tokens_scored,
            "truncated": {task: self.truncated(task) for task in self._truncation.tasks()},
            "faults": self.faults.report(),
        }

    def truncated(self, task: str | None = None) -> dict[str, int]:
        """Counts of the items that were cut, see `Truncation.report`."""
        return self._truncation.report(task)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text. Without a generation prompt the last message stays open, to be continued.

        A template that refuses the system role gets the conversation without its system message, and a warning is
        logged, as in lm-eval's ``hf``. Raises RequestError for a template that leaves a text out or exceeds a limit.
        """
        if not has_template(self.tokenizer):
            raise ConfigError("the model has no chat template: leave out --apply_chat_template")
        template = template_of(self.tokenizer)

        def render(turns: list[dict[str, str]]) -> str:
            if not add_generation_prompt:
                return write_open(template, turns)
            text = write(template, turns)
            check_arrival(template, turns, text)
            return text

        turns = [{"role": message["role"], "content": message["content"]} for message in chat_history]
        others = [turn for turn in turns if turn["role"] != "system"]
        try:
            return render(turns)
        except TemplateRefusal as error:
            if len(others) in (0, len(turns)):
                raise
            log.warning("%s: the system message is dropped", error)
            return render(others)

    # --- text to token ids ---

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, with BOS by the rule of the class and never with two. Raises RequestError as `token_ids`."""
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id])):
            wanted = False
        ids = token_ids(self.tokenizer, string, wanted)
        bos = self.tokenizer.bos_token_id
        return [bos, *ids] if wanted and bos is not None and ids[:1] != [bos] else ids

    def _pair(self, request: Instance) -> tuple[list[int], list[int]]:
        """Token ids of context and continuation, neither of them empty. Raises RequestError where none can be scored.

        Where the two merge into one token, nothing of the whole is left behind the context, and lm-eval's ``hf`` model
        fails. Here the continuation is then encoded by itself, as lm-eval does for encoder-decoder models.
        """
        context, continuation = request.args
        if context:
            context_ids, ids = self._encode_pair(context, continuation)
        else:
            context_ids, ids = [], self.tok_encode(continuation, add_special_tokens=False)
        if context and continuation and not ids:
            text = context.rstrip()
            context_ids = self.tok_encode(text)
            ids = self.tok_encode(context[len(text) :] + continuation, add_special_tokens=False)
            self.faults.note("encoded_apart", request, f"{context[-20:]!r}, {continuation[:20]!r}")
        if not context_ids and ids[:1] == [self.prefix_token_id]:
            context_ids, ids = ids[:1], ids[1:]
        if not ids:
            raise RequestError(f"the continuation {one_line(repr(continuation), 40)} has no tokens: nothing to score")
        if len(ids) > self.max_length:
            raise RequestError(
                f"a continuation of {len(ids)} tokens exceeds max-model-len {self.max_length}: raise max-model-len"
            )
        context_ids = context_ids or [self.prefix_token_id]
        read_token_ids(context_ids + ids, self.llm.model.vocab_size)
        return context_ids, ids

    # --- the three kinds of request ---

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(natural log-probability of the continuation, whether greedy decoding gives it), per request."""
        pairs, scored = [], []
        answers = [FAILED] * len(requests)
        with self.faults.of_call(requests) as errors:
            for index, request in enumerate(requests):
                try:
                    context, ids = self._pair(request)
                except RequestError as error:
                    errors[index] = error
                    self.answers.note(request, FAILED)
                    continue
                whole = self._truncation.cut(request, context + ids, self.max_length + 1)  # the last token is not run
                pairs.append((request.args, whole[: -len(ids)], ids))
                scored.append(index)
            for place, answer in self._score(pairs, disable_tqdm):
                index = scored[place]
                if isinstance(answer, LeanError):
                    errors[index] = answer
                else:
                    answers[index] = answer
                self.answers.note(requests[index], answers[index])
            self._truncation.warn()
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """`loglikelihood` of (key for lm-eval's cache or None, context ids, continuation ids) that fit."""
        answers = [FAILED] * len(requests)
        for index, answer in self._score(requests, disable_tqdm):
            if isinstance(answer, LeanError):
                raise answer
            answers[index] = answer
        return answers

    def _score(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool
    ) -> Iterator[tuple[int, tuple[float, bool] | LeanError]]:
        """(index, answer) as of `_loglikelihood_tokens`, with the error of a request in the place of its answer."""
        sequences = [(context + ids, len(ids)) for _, context, ids in requests]
        with self._bar(len(requests), "likelihoods", disable_tqdm) as bar:
            for part in _parts(len(requests), self.batch_size):
                for place, answer in score_each(self.llm, sequences[part]):
                    index = part.start + place
                    bar.update()
                    if not isinstance(answer, LeanError):
                        self.tokens_scored += sequences[index][1]
                        if requests[index][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                    yield index, answer

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of every token of each document, in windows that overlap by one token."""
        windows, owners = [], []
        found: list[dict[int, float]] = [{} for _ in requests]  # of each document, by window
        with self.faults.of_call(requests) as errors:
            for index, request in enumerate(requests):
                try:
                    ids = self.tok_encode(request.args[0], add_special_tokens=False)
                except RequestError as error:
                    errors[index], found[index][-1] = error, FAILED[0]
                    self.answers.note(request, FAILED[0])
                    continue
                ids = ids[1:] if ids[:1] == [self.prefix_token_id] else ids  # a BOS in the text becomes the prefix
                for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                    windows.append((None, *make_disjoint_window(pair)))
                    owners.append(index)
                if not ids:
                    self.answers.note(request, 0.0)
            left = Counter(owners)
            for window, answer in self._score(windows, disable_tqdm):
                owner = owners[window]
                if isinstance(answer, LeanError):
                    errors.setdefault(owner, answer)
                found[owner][window] = FAILED[0] if isinstance(answer, LeanError) else answer[0]
                left[owner] -= 1
                if not left[owner]:
                    total = _in_order(found[owner])
                    self.answers.note(requests[owner], total)
                    if owner not in errors:
                        self.cache_hook.add_partial("loglikelihood_rolling", requests[owner].args, total)
            self._truncation.warn()
        return [_in_order(values) for values in found]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to a stop string; greedy unless the task asks for sampling."""
        jobs: dict[Job, list[int]] = {}  # equal greedy requests run once; samples are drawn one by one
        answers = [""] * len(requests)
        with self.faults.of_call(requests) as errors:
            for index, request in enumerate(requests):
                try:
                    context, given = request.args
                    params = sampling_params(self.llm, given, self.max_gen_toks)
                    room = _room_beside(params.max_tokens, self.max_length)
                    ids = self._truncation.cut(request, self.tok_encode(context) or [self.prefix_token_id], room)
                    job = tuple(ids), params, index if params.temperature else None
                except RequestError as error:
                    errors[index] = error
                    self.answers.note(request, "")
                else:
                    jobs.setdefault(job, []).append(index)
            with self._bar(len(requests), "texts", disable_tqdm) as bar:
                waiting = list(jobs)
                for part in _parts(len(waiting), self.batch_size):
                    for job, text in generate_texts(self.llm, sorted(waiting[part], key=lambda job: -len(job[0]))):
                        for index in jobs[job]:
                            if isinstance(text, LeanError):
                                errors[index] = text
                            else:
                                answers[index] = text
                                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                            self.answers.note(requests[index], answers[index])
                            bar.update()
            self._truncation.warn()
        return answers

    def _bar(self, total: int, what: str, disable: bool) -> tqdm:
        return tqdm(total=total, desc=what, disable=disable or not self._progress)


def _parts(count: int, batch_size: int) -> Iterator[slice]:
    """Slices of requests, of which each is run before the next one. Within a slice the longest run first.

    So most items that an interrupted run has answered are the first ones, not the longest of all tasks.
    """
    size = max(_PART, _PART_BATCHES * batch_size)
    return (slice(start, start + size) for start in range(0, count, size))


def _in_order(values: Mapping[int, float]) -> float:
    """The sum of values in the order of their numbers: the same bits, whichever came first."""
    return sum((value for _, value in sorted(values.items())), 0.0)


def _room_beside(new_tokens: int, max_length: int) -> int:
    """The most tokens of a context that ``new_tokens`` can follow. Raises RequestError where that is none."""
    if new_tokens >= max_length:
        raise RequestError(
            f"{new_tokens} new tokens leave no room in max-model-len {max_length}: lower max_gen_toks to at most "
            f"{max_length - 1}, or raise max-model-len"
        )
    return max_length - new_tokens
