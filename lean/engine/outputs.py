"""What a step gives a request: its next token, the text that token made certain, and whether it was the last one."""

from collections.abc import Collection
from dataclasses import replace

import torch

from lean.engine.request import FinishReason, Request, RequestOutput
from lean.engine.runner import Runner
from lean.engine.sampler import token_logprobs
from lean.engine.scheduler import Chunk


def next_output(request: Request, logits: torch.Tensor, eos_token_ids: Collection[int]) -> RequestOutput:
    """Sample a request's next token from ``logits`` [vocab] and say what came of it.

    The request gets the token; taking an ended one out is the caller's.
    """
    assert request.sampler is not None
    assert request.detokenizer is not None
    params = request.params
    token = request.sampler.sample(logits)
    request.output_token_ids.append(token)
    reason: FinishReason | None = None
    if token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos):
        reason = "stop"
    elif len(request.output_token_ids) >= params.max_tokens:
        reason = "length"
    text = request.stop_strings.add(request.detokenizer.add([] if reason == "stop" else [token]))
    if reason is not None:
        text += request.stop_strings.add(request.detokenizer.finish())
    if request.stop_strings.stopped:
        reason = "stop"
    elif reason is not None:
        text += request.stop_strings.finish()
    logprobs = None if params.logprobs is None else token_logprobs(logits[None], [token], params.logprobs)
    first = len(request.output_token_ids) == 1 and params.prompt_logprobs is not None
    return RequestOutput(
        request.request_id,
        text,
        [token],
        len(request.prompt_token_ids),
        reason,
        index=request.index,
        cached_tokens=request.num_cached_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs if first else None,
    )


def last_output(request: Request, reason: FinishReason | None, error: str | None = None) -> RequestOutput:
    """An output without a token, the last one where there is a ``reason``: aborted, failed, or scored to its end."""
    text = ""
    if request.detokenizer is not None:
        text = request.stop_strings.add(request.detokenizer.finish()) + request.stop_strings.finish()
    prompt = len(request.prompt_token_ids)
    return RequestOutput(request.request_id, text, [], prompt, reason, error, request.index)


def score_prompt(chunk: Chunk, hidden: torch.Tensor, runner: Runner, token_limit: int) -> None:
    """Append the log-probabilities of the prompt's tokens that this chunk's rows ``hidden`` predict.

    A request that is computed again after a preemption keeps those it has. Logits exist for `logit_rows` rows at once.
    """
    request = chunk.request
    known, prompt = request.prompt_logprobs, request.prompt_token_ids
    if not known:
        known.append(None)
    while (target := len(known)) < min(chunk.end + 1, len(prompt)):
        first = target - 1 - chunk.start
        rows = hidden[first : first + min(runner.model.logit_rows, len(prompt) - target)]
        logits = runner.logits(rows)
        logits[:, token_limit:] = -torch.inf
        known += token_logprobs(logits, prompt[target : target + len(rows)], request.params.prompt_logprobs or 0)


def joined(parts: list[RequestOutput]) -> RequestOutput:
    """The outputs of one sequence as one."""
    logprobs = None if parts[0].logprobs is None else [entry for part in parts for entry in part.logprobs or ()]
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=logprobs,
        prompt_logprobs=parts[0].prompt_logprobs,
        cached_tokens=parts[0].cached_tokens,
    )
