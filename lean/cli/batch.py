"""Answer a file of prompts into a file of results. A run that was interrupted can be continued."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lean.cli.batch_results import ResultsWriter, open_results
from lean.cli.batch_rows import Row
from lean.engine.request import RequestOutput
from lean.errors import EngineError, RequestError
from lean.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lean.llm import LLM

LINE_EVERY_S = 10.0  # between two lines of progress, without a terminal
WORST_FIRST = ("error", "abort", "length", "stop")


@dataclass(frozen=True)
class BatchSummary:
    """Rows that a `run_batch` answered, that were in the file already, and that failed; tokens generated; seconds."""

    done: int
    skipped: int
    failed: int
    tokens: int
    seconds: float


@dataclass
class _Answer:
    """One of a row's n answers, as far as it is generated."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        result = {"text": "".join(self.text), "token_ids": self.token_ids, "finish_reason": self.finish_reason}
        return result if self.logprobs is None else result | {"logprobs": self.logprobs}


@dataclass
class _Running:
    """A row that the engine is answering."""

    row: Row
    n: int = 1
    prompt_tokens: int | None = None
    answers: dict[int, _Answer] = field(default_factory=dict)
    prompt_logprobs: list[Any] | None = None
    error: str | None = None

    def start(self, llm: LLM, params: SamplingParams, chat: bool | None) -> int:
        """Hand the row to the engine; returns the request's id. Raises RequestError if the engine cannot serve it."""
        params = replace(params, **self.row.params)
        self.n = params.n
        if self.row.messages is not None:
            ids = llm.encode_chat(self.row.messages)
        else:
            ids = llm.encode(self.row.prompt or "", chat=chat)
        self.prompt_tokens = len(ids)
        return llm.add_request(ids, params)

    def add(self, output: RequestOutput) -> bool:
        """Add the output of a step; returns whether the row has ended."""
        answer = self.answers.setdefault(output.index, _Answer())
        answer.text.append(output.text)
        answer.token_ids += output.token_ids
        if output.logprobs is not None:
            answer.logprobs = answer.logprobs or []
            answer.logprobs += _plain(output.logprobs)
        if output.prompt_logprobs is not None:  # the same for each answer of a row
            self.prompt_logprobs = self.prompt_logprobs or _plain(output.prompt_logprobs)
        answer.finish_reason = output.finish_reason
        self.error = self.error or output.error
        return len(self.answers) == self.n and all(one.finish_reason for one in self.answers.values())

    def as_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {"id": self.row.id}
        if self.error:
            result["error"] = self.error
        if not self.answers:
            result["finish_reason"] = "error"
        elif self.n == 1:
            result |= self.answers[0].as_json()
        else:
            reasons = [answer.finish_reason for answer in self.answers.values()]
            choices = sorted(self.answers.items())
            result["choices"] = [{"index": index, **answer.as_json()} for index, answer in choices]
            result["finish_reason"] = next(reason for reason in WORST_FIRST if reason in reasons)
        result["prompt_tokens"] = self.prompt_tokens
        result["completion_tokens"] = sum(len(answer.token_ids) for answer in self.answers.values())
        return result if self.prompt_logprobs is None else result | {"prompt_logprobs": self.prompt_logprobs}


def _plain(logprobs: list[Any]) -> list[Any]:
    """Log-probabilities as JSON values; null where a number is not finite."""
    return [None if logprob is None else _finite(asdict(logprob)) for logprob in logprobs]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Progress:
    """Rows done, speed and time left: a bar on a terminal, else a line every LINE_EVERY_S seconds."""

    def __init__(self, console: Console, total: int, skipped: int) -> None:
        self._console, self._total, self._skipped = console, total, skipped
        self._started = self._last_line = time.perf_counter()
        self.bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows{task.fields[pace]}", markup=False))
            self.bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
            self._task = self.bar.add_task("", total=total, completed=skipped, pace="")

    def show(self, ended: int, tokens: int) -> None:
        """``ended``: rows that ended in this run. ``tokens``: generated in this run, unfinished rows included."""
        now = time.perf_counter()
        seconds, done = now - self._started, self._skipped + ended
        rate = tokens / seconds if seconds else 0.0
        pace = f", {rate:,.{0 if rate >= 10 else 1}f} tokens/s"
        if ended:
            pace += f", {_duration(seconds / ended * (self._total - done))} left"
        if self.bar:
            self.bar.update(self._task, completed=done, pace=pace)
        elif now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            _say(self._console, f"{done} of {self._total} rows{pace}")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Batch:
    """Rows in the engine, and counts of those that ended. Each row is written when it ends."""

    def __init__(self, llm: LLM, writer: ResultsWriter, params: SamplingParams, chat: bool | None) -> None:
        self._llm, self._writer, self._params, self._chat = llm, writer, params, chat
        self.running: dict[int, _Running] = {}
        self.answered = self.failed = self.tokens = 0

    def start(self, row: Row) -> None:
        """Hand a row to the engine; a row that it cannot serve fails."""
        request = _Running(row)
        try:
            self.running[request.start(self._llm, self._params, self._chat)] = request
        except RequestError as error:
            request.error = str(error)
            self._end(request)

    def step(self) -> None:
        """Run a step of the engine. Raises EngineError if it stops before all rows have ended."""
        outputs = self._llm.step() if self.running else []
        for output in outputs:
            request = self.running.get(output.request_id)
            if request is None:
                continue
            self.tokens += len(output.token_ids)
            if request.add(output):
                self._end(request)
                del self.running[output.request_id]
        if self.running and not outputs and not self._llm.has_work:
            raise EngineError(f"the engine lost {len(self.running)} requests")

    def _end(self, request: _Running) -> None:
        self._writer.write(request.as_json())
        self.failed += request.error is not None
        self.answered += request.error is None

    def abort(self) -> None:
        """Take back a half-written line, and end all running requests."""
        self._writer.take_back()
        for request_id in self.running:
            self._llm.abort(request_id)


def run_batch(
    llm: LLM, rows: list[Row], out: Path, params: SamplingParams, chat: bool | None, console: Console
) -> BatchSummary:
    """Answer the rows that are not in ``out`` yet, and append each to ``out`` as a line of JSON when it ends.

    A row that cannot be served, or whose numbers become non-finite, is written with an "error"; the other rows go on.
    If the run ends early, by an interrupt or an error, ``out`` holds whole lines only, and the same call continues.

    Args:
        params: sampling parameters of rows that give none.
        chat: see `lean.text.prompt.encode_prompt`; rows with messages are always chats.
        console: where progress is shown.

    Raises:
        LeanError: the file cannot be written, or the engine failed.
    """
    out = Path(out)
    with open_results(out) as (file, done):
        todo = deque(row for row in rows if row.id not in done)
        skipped = len(rows) - len(todo)
        if not todo:
            _say(console, f"nothing to do: all {len(rows)} rows are in {out}")
            return BatchSummary(0, skipped, 0, 0, 0.0)
        batch = _Batch(llm, ResultsWriter(file, out), params, chat)
        progress = _Progress(console, len(rows), skipped)
        started = time.perf_counter()
        with progress.bar or nullcontext():
            try:
                while todo or batch.running:
                    while todo and len(batch.running) < 2 * llm.config.max_num_seqs:
                        batch.start(todo.popleft())
                    batch.step()
                    progress.show(batch.answered + batch.failed, batch.tokens)
            except BaseException:
                batch.abort()
                ended = skipped + batch.answered + batch.failed
                _say(console, f"{ended} of {len(rows)} rows are in {out}: run the same command to continue")
                raise
        return BatchSummary(batch.answered, skipped, batch.failed, batch.tokens, time.perf_counter() - started)
