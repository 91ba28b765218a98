"""lean as a model of lm-evaluation-harness: every likelihood and every text through the engine's own cache.

Importing this module registers the model ``lean`` with lm-eval (https://github.com/EleutherAI/lm-evaluation-harness).
lm-eval 0.4 looks for no plugins, so somebody has to import it: `python -m lean.eval.tasks` is the ``lm_eval`` command
with lean registered.
"""

import logging
from collections.abc import Hashable, Iterator, Sequence
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
from lean.errors import ConfigError, EngineError, RequestError, one_line
from lean.eval.harness.args import engine_config, sampling_params
from lean.eval.score.continuations import score_continuations
from lean.llm import LLM
from lean.report import kv_report

log = logging.getLogger("lean")

REQUESTS_AT_ONCE = 1024  # handed to the engine together; it runs max_num_seqs of them and queues the rest


@register_model("lean")
class LeanLM(TemplateLM):
    """A lean engine that lm-eval can ask for likelihoods and texts.

    The boundary between context and continuation is lm-eval's (spaces at the end of the context go to the continuation,
    both are tokenized as one text). What is too long loses tokens on the left; `truncated` counts them. BOS: a context
    gets the one that the tokenizer or its own text begins with, Gemma's always; an empty context becomes the prefix
    token. A document of `loglikelihood_rolling` is scored after one prefix token, which is not scored itself; where it
    is longer than the engine takes, later windows begin with the document's own tokens. lm-eval's ``hf`` model scores a
    second BOS there with tokenizers that add one; with ``add_bos_token=False`` it does as lean.

    Args:
        pretrained: what `LLM` takes as a model, or an LLM.
        max_gen_toks: most new tokens where the task says nothing.
        add_bos_token: whether a context begins with BOS; None: as the tokenizer does.
        prefix_token_id: the token before an empty context; BOS, else EOS.
        batch_size, max_batch_size: lm-eval's; unused, since the engine batches as requests come and go: `max_num_seqs`.
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
                raise ConfigError(f"{', '.join(options)}: an engine that is already made cannot be configured")
            self.llm = pretrained
        else:
            self.llm = LLM(str(pretrained), engine_config(options), progress=progress)
        self.tokenizer = self.llm.model.tokenizer
        self._progress = progress
        self._max_gen_toks = int(max_gen_toks)
        if add_bos_token is None and "gemma" in self.llm.model.info.config.model_type:
            add_bos_token = True  # without it Gemma's likelihoods mean nothing
        self.add_bos_token = add_bos_token
        prefix = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        given = [int(token) for token in prefix if token is not None]
        if not given:
            raise ConfigError("the tokenizer has neither BOS nor EOS: give prefix_token_id, a token to begin with")
        self._prefix_token_id = given[0]
        self.tokens_scored = 0
        self._dropped: dict[tuple[str, Hashable], int] = {}  # (task, document): most tokens that one request lost
        if batch_size not in (None, 1, "1", "auto"):
            log.warning("batch_size %s is not used: the engine runs up to max_num_seqs requests at once", batch_size)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None) -> "LeanLM":
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict | None = None) -> "LeanLM":
        """From model arguments over lm-eval's own flags. Its default ``--device cuda:0`` is what auto means here."""
        flags = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if flags.get("device") == "cuda:0":
            del flags["device"]
        return cls(**(flags | arg_dict))

    # --- what lm-eval asks about the model ---

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        return self._prefix_token_id

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens; without end under a window on every layer."""
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
        """How sequences begin, in words."""
        prefix = self.tokenizer.decode([self.prefix_token_id])
        own = {None: "as the tokenizer adds it", True: "always", False: "never"}[self.add_bos_token]
        return f"contexts: BOS {own}; empty contexts and the first window of rolling documents: {prefix}, not scored"

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results: engine options, cache, BOS rule, and what was cut and scored."""
        return {
            "model_name": self.llm.model.info.source.name,
            "model_dtype": str(self.llm.model.info.dtype).removeprefix("torch."),
            "engine": asdict(self.llm.config),
            "kv": kv_report(self.llm),
            "bos": self.bos_rule,
            "tokens_scored": self.tokens_scored,
            "truncated": {task: self.truncated(task) for task in dict.fromkeys(task for task, _ in self._dropped)},
        }

    def truncated(self, task: str | None = None) -> dict[str, int]:
        """Of the items of a task, or of all: how many were cut, of how many, and the most tokens that one lost."""
        lost = [dropped for (name, _), dropped in self._dropped.items() if task in (None, name)]
        return {"items": sum(map(bool, lost)), "of": len(lost), "max_tokens_dropped": max(lost, default=0)}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; the last message is left open for more where no answer is to begin.

        A template without a system role gets the conversation without it, and a warning, as in lm-eval's ``hf``.
        """
        import jinja2

        if not self.tokenizer.chat_template:
            raise ConfigError("the model has no chat template: leave out --apply_chat_template")

        def render(messages: list[dict[str, str]]) -> str:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        try:
            return render(chat_history)
        except jinja2.TemplateError as error:
            log.warning("the chat template refuses a conversation (%s): its system message is left out", error)
            return render([message for message in chat_history if message["role"] != "system"])

    # --- text to token ids ---

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; with BOS as the class says, and never a second one."""
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id])):
            wanted = False
        special = {} if wanted is None else {"add_special_tokens": wanted}
        ids = list(self.tokenizer(string, verbose=False, **special)["input_ids"])
        bos = self.tokenizer.bos_token_id
        return [bos, *ids] if wanted and bos is not None and ids[:1] != [bos] else ids

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, neither of them empty."""
        if context:
            context_ids, ids = self._encode_pair(context, continuation)
        else:
            context_ids, ids = [], self.tok_encode(continuation, add_special_tokens=False)
        if not context_ids and ids[:1] == [self.prefix_token_id]:
            context_ids, ids = ids[:1], ids[1:]
        if not ids:
            raise RequestError(f"the continuation {one_line(repr(continuation), 40)} is no token: nothing to score")
        return context_ids or [self.prefix_token_id], ids

    def _cut(self, request: Instance, ids: list[int], room: int) -> list[int]:
        """The last ``room`` tokens; what is dropped is counted for the request's item."""
        item = (request.task_name or "", len(self._dropped) if request.doc_id is None else request.doc_id)
        self._dropped[item] = max(self._dropped.get(item, 0), len(ids) - room, 0)
        return ids[-room:]

    def _say_truncated(self) -> None:
        cut = self.truncated()
        if cut["items"]:
            log.warning(
                "%d of %d items truncated (max %d tokens dropped)", cut["items"], cut["of"], cut["max_tokens_dropped"]
            )

    # --- the three kinds of request ---

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding gives it), in natural logarithms."""
        pairs = []
        for request in requests:
            context, ids = self._pair(*request.args)
            if len(ids) > self.max_length:
                raise RequestError(
                    f"a continuation has {len(ids)} tokens, max-model-len is {self.max_length}: raise it"
                )
            whole = self._cut(request, context + ids, self.max_length + 1)  # the last token is not run
            pairs.append((request.args, whole[: -len(ids)], ids))
        answers = self._loglikelihood_tokens(pairs, disable_tqdm)
        self._say_truncated()
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """`loglikelihood` of (what to call it in lm-eval's cache or None, context ids, continuation ids) that fit."""
        sequences = [(context + ids, len(ids)) for _, context, ids in requests]
        self.tokens_scored += sum(count for _, count in sequences)
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        with self._bar(len(requests), "likelihoods", disable_tqdm) as bar:
            for index, logprob, greedy in score_continuations(self.llm, sequences):
                answers[index] = logprob, greedy
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
                bar.update()
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of every token of each document, in windows that overlap by one token."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            ids = ids[1:] if ids[:1] == [self.prefix_token_id] else ids  # a BOS in the text is the prefix
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[owner] += logprob
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop string; greedy unless the task asks for sampling."""
        jobs: dict[Hashable, list[int]] = {}  # equal greedy requests are one; samples are drawn one by one
        for index, request in enumerate(requests):
            context, given = request.args
            params = sampling_params(self.llm, given, self.max_gen_toks)
            room = self.max_length - params.max_tokens
            if room < 1:
                raise RequestError(f"{params.max_tokens} new tokens leave no room in max-model-len {self.max_length}")
            ids = self._cut(request, self.tok_encode(context) or [self.prefix_token_id], room)
            own = index if params.temperature else None
            jobs.setdefault((tuple(ids), params, own), []).append(index)
        answers = [""] * len(requests)
        with self._bar(len(requests), "texts", disable_tqdm) as bar:
            for key, text in self._generate(sorted(jobs, key=lambda job: -len(job[0]))):
                for index in jobs[key]:
                    answers[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update()
        self._say_truncated()
        return answers

    def _generate(self, jobs: Sequence[Any]) -> Iterator[tuple[Any, str]]:
        """Run (token ids, SamplingParams, ...) together; yields (job, text) as they end."""
        for start in range(0, len(jobs), REQUESTS_AT_ONCE):
            running: dict[int, Any] = {}
            texts: dict[int, str] = {}
            try:
                for job in jobs[start : start + REQUESTS_AT_ONCE]:
                    running[self.llm.add_request(job[0], job[1])] = job
                while running:
                    for output in self.llm.step():
                        if output.request_id not in running:
                            continue
                        if output.finish_reason in ("error", "abort"):
                            raise EngineError(output.error or "the request was aborted")
                        texts[output.request_id] = texts.get(output.request_id, "") + output.text
                        if output.finish_reason is not None:
                            yield running.pop(output.request_id), texts.pop(output.request_id)
            finally:
                for request_id in running:
                    self.llm.abort(request_id)

    def _bar(self, total: int, what: str, disable: bool) -> tqdm:
        return tqdm(total=total, desc=what, disable=disable or not self._progress)
