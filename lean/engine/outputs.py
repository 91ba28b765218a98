"""Outputs of a sequence: its next token with the text that is now certain, and its end."""

from collections.abc import Collection
from dataclasses import replace

from lean.engine.logprobs import token_logprobs
from lean.engine.request import FinishReason, Request, RequestOutput
from lean.engine.sampling import Sample


def next_output(request: Request, sample: Sample, eos_token_ids: Collection[int]) -> RequestOutput:
    """Append a sequence's next token to the request.

    The output has a finish_reason where the sequence ends; the caller then removes the request.
    """
    assert request.detokenizer is not None
    params = request.params
    token = sample.token
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
    logprobs = None
    if params.logprobs is not None and sample.measured is not None:
        logprobs = token_logprobs(sample.measured[None], params.logprobs)
    first = len(request.output_token_ids) == 1 and params.prompt_logprobs is not None
    return RequestOutput(
        request.request_id,
        text,
        [token],
        len(request.prompt_token_ids),
        reason,
        index=request.index,
        cached_tokens=request.num_cached_tokens or 0,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs if first else None,
    )


def tokenless_output(request: Request, reason: FinishReason | None, error: str | None = None) -> RequestOutput:
    """An output without a token. With a ``reason`` it is the last one: aborted, failed, or scored completely."""
    text = ""
    if request.detokenizer is not None:
        text = request.stop_strings.add(request.detokenizer.finish()) + request.stop_strings.finish()
    prompt = len(request.prompt_token_ids)
    cached = request.num_cached_tokens or 0
    return RequestOutput(request.request_id, text, [], prompt, reason, error, request.index, cached)


def joined(parts: list[RequestOutput]) -> RequestOutput:
    """The outputs of one sequence joined into one."""
    logprobs = None if parts[0].logprobs is None else [entry for part in parts for entry in part.logprobs or ()]
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=logprobs,
        prompt_logprobs=parts[0].prompt_logprobs,
        cached_tokens=parts[0].cached_tokens,
    )
