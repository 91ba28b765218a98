"""Texts generated for lm-eval, many requests at once."""

from collections.abc import Iterator, Sequence

from lean.errors import EngineError, LeanError, RequestError
from lean.eval.score.continuations import SEQUENCES_AT_ONCE
from lean.llm import LLM
from lean.sampling_params import SamplingParams

Job = tuple[tuple[int, ...], SamplingParams, int | None]
"""Prompt token ids, parameters, and a number that keeps equal sampling requests apart; None for greedy ones."""


def generate_texts(llm: LLM, jobs: Sequence[Job]) -> Iterator[tuple[Job, str | LeanError]]:
    """Run jobs together and yield (job, text) as they end. Closing the iterator aborts the running ones.

    In the place of a text stands a RequestError where the job cannot be served, an EngineError where it failed.
    """
    for start in range(0, len(jobs), SEQUENCES_AT_ONCE):
        running: dict[int, Job] = {}
        texts: dict[int, str] = {}
        try:
            for job in jobs[start : start + SEQUENCES_AT_ONCE]:
                try:
                    running[llm.add_request(job[0], job[1])] = job
                except RequestError as error:
                    yield job, error
            while running:
                for output in llm.step():
                    if output.request_id not in running:
                        continue
                    if output.finish_reason in ("error", "abort"):
                        texts.pop(output.request_id, None)
                        yield running.pop(output.request_id), EngineError(output.error or "the request was aborted")
                        continue
                    texts[output.request_id] = texts.get(output.request_id, "") + output.text
                    if output.finish_reason is not None:
                        yield running.pop(output.request_id), texts.pop(output.request_id)
        finally:
            for request_id in running:
                llm.abort(request_id)
