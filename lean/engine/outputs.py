"""What a step gives a request: its next token, the text that token made certain, and whether it was the last one."""

from collections.abc import Collection
from dataclasses import replace

import torch

from lean.engine.request import FinishReason, Request, RequestOutput
from lean.engine.sampler import token_logprobs


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
