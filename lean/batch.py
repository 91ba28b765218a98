"""Many prompts from a file, many answers into a file, resumable."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lean.errors import EMPTY_PROMPT, EngineError, LeanError, RequestError, one_line
from lean.prompt import ROLES
from lean.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from lean.engine import LLM

LINE_EVERY_S = 10.0  # progress where there is no terminal
ROW_START = b'{"id": '  # of every line that is written; by it a cut one is known as lean's own
PARAMS = frozenset(item.name for item in fields(SamplingParams))
WORST_FIRST = ("error", "abort", "length", "stop")

RowId = str | int


@dataclass(frozen=True)
class Row:
    """One line of the prompts: a text or chat messages, and what overrides the command's sampling parameters."""

    id: RowId
    prompt: str | None
    messages: list[dict[str, str]] | None
    params: dict[str, Any]


@dataclass(frozen=True)
class BatchSummary:
    """What one `run_batch` did: rows answered, found answered, ended in an error; tokens generated, and how long."""

    done: int
    skipped: int
    failed: int
    tokens: int
    seconds: float


# --- the prompts ---


def read_rows(path: Path, params: SamplingParams | None = None) -> list[Row]:
    """Read and check a whole file of prompts, one JSON object a line; ``params`` are those that rows override.

    Raises:
        RequestError: the file cannot be read or has no rows, or a line is no row; the message names the line.
    """
    params = params or SamplingParams()
    rows: list[Row] = []
    lines: dict[RowId, int] = {}
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    continue
                try:
                    row = _read_row(line, number, params)
                    if row.id in lines:
                        raise RequestError(f"id {_shown(row.id)} is that of line {lines[row.id]}")
                except RequestError as error:
                    raise RequestError(f"{path} line {number}: {error}") from None
                lines[row.id] = number
                rows.append(row)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise RequestError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not rows:
        raise RequestError(f'{path} has no rows: write one JSON object a line, e.g. {{"prompt": "Hello"}}')
    return rows


def _read_row(line: bytes, number: int, params: SamplingParams) -> Row:
    values = _read_object(line)
    for key in values:
        if key not in PARAMS and key not in ("id", "prompt", "messages"):
            known = ", ".join(["id", "prompt", "messages", *sorted(PARAMS)])
            raise RequestError(f"unknown key {_shown(key)}; known are {known}")
    if ("prompt" in values) == ("messages" in values):
        raise RequestError("give prompt or messages, " + ("not both" if "prompt" in values else "one of them"))
    row_id = values.get("id", number)
    if not _is_id(row_id):
        raise RequestError(f"id must be a string or a whole number, not {_shown(row_id)}")
    prompt, messages = values.get("prompt"), values.get("messages")
    if "prompt" in values:
        if not isinstance(prompt, str):
            raise RequestError(f"prompt must be a string, not {_shown(prompt)}")
        if not prompt:
            raise RequestError(EMPTY_PROMPT)
    else:
        _check_messages(messages)
    own = {key: value for key, value in values.items() if key in PARAMS}
    replace(params, **own)  # checks them
    return Row(row_id, prompt, messages, own)


def _read_object(line: bytes) -> dict[str, Any]:
    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        values = json.loads(line.decode("utf-8"), parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, thousands of brackets
        raise RequestError(f"not JSON that can be read: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise RequestError(f"must be a JSON object, not {_shown(values)}")
    return values


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a list with at least one message, not {_shown(messages)}")
    for place, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                shown = _shown(message)
                raise RequestError(f"messages[{place}] must be an object whose {key} is a string, not {shown}")
        if message["role"] not in ROLES:
            raise RequestError(f"messages[{place}] has the role {_shown(message['role'])}, not {', '.join(ROLES)}")


def _is_id(value: object) -> TypeGuard[RowId]:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return one_line(json.dumps(value), 60)


# --- the results ---


def read_done(out: Path, prompts: Path | None = None) -> set[RowId]:
    """The ids of the rows that an earlier run wrote. A last line that its end cut off is taken off the file.

    Raises:
        RequestError: ``out`` can be no file of results, is ``prompts`` itself, another run writes to it, or it holds
            something that lean did not write; it is left as it is.
    """
    out = Path(out)
    try:
        if out.is_dir():
            raise RequestError(f"{out} is a folder: name a file for the results")
        if not out.parent.is_dir():
            raise RequestError(f"no folder {out.parent} to write {out.name} into: make it first")
        if prompts is not None and (out.resolve() == prompts.resolve() or (out.exists() and out.samefile(prompts))):
            raise RequestError(f"{out} holds the prompts: name another file for the results")
        if not out.exists():
            if not os.access(out.parent, os.W_OK | os.X_OK):
                raise RequestError(f"cannot write {out}: its folder is read-only")
            return set()
        with _open_results(out) as (_, done):
            return done
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # ValueError: a NUL in the path; RuntimeError: a link to itself
        raise RequestError(f"cannot write {out}: {getattr(error, 'strerror', None) or one_line(error)}") from None


@contextmanager
def _open_results(out: Path) -> Iterator[tuple[BinaryIO, set[RowId]]]:
    """A file of whole lines, open to append without a buffer, and the ids in it. Only one run at a time has it."""
    if out.exists() and not out.is_file():
        raise RequestError(f"{out} is no plain file: name one for the results")
    with out.open("ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"another run is writing to {out}: wait for it, or name another file") from None
        done, end = _read_results(out)
        if end < os.fstat(file.fileno()).st_size:
            file.truncate(end)
        yield file, done


def _read_results(out: Path) -> tuple[set[RowId], int]:
    """The ids in a file of results, and where its last whole line ends. What was cut off may only be the last line."""
    lines: dict[RowId, int] = {}
    end = 0
    cut: RequestError | None = None
    with out.open("rb") as file:
        for number, line in enumerate(file, 1):
            if cut:
                raise cut
            where = f"{out} line {number}"
            try:
                result = _read_object(line)
                if not line.endswith(b"\n"):
                    raise RequestError("it does not end")
            except RequestError as error:
                cut = RequestError(f"{where} is damaged, {error}: repair it or name another file")
                begun = line.rstrip(b"\0")  # zeros: a power failure
                if not begun.startswith(ROW_START[: len(begun)]):
                    raise cut from None
                continue
            row_id = result.get("id")
            if not _is_id(row_id) or "finish_reason" not in result:
                raise RequestError(f"{where} is no result of a batch: name another file")
            if row_id in lines:
                raise RequestError(f"{where}: id {_shown(row_id)} is that of line {lines[row_id]}: remove one of them")
            lines[row_id] = number
            end += len(line)
    return set(lines), end


# --- the run ---


@dataclass
class _Answer:
    """One of a row's n answers, as far as it is."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    finish_reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        result = {"text": "".join(self.text), "token_ids": self.token_ids, "finish_reason": self.finish_reason}
        return result if self.logprobs is None else result | {"logprobs": self.logprobs}


@dataclass
class _Running:
    """A row on its way through the engine."""

    row: Row
    n: int = 1
    prompt_tokens: int | None = None
    answers: dict[int, _Answer] = field(default_factory=dict)
    prompt_logprobs: list[Any] | None = None
    error: str | None = None

    def start(self, llm: LLM, params: SamplingParams, chat: bool | None) -> int:
        """Hand the row to the engine; returns the request's id. Raises RequestError where it cannot be served."""
        params = replace(params, **self.row.params)
        self.n = params.n
        if self.row.messages is not None:
            ids = llm.encode_chat(self.row.messages)
        else:
            ids = llm.encode(self.row.prompt or "", chat=chat)
        self.prompt_tokens = len(ids)
        return llm.add_request(ids, params)

    def add(self, output: RequestOutput) -> bool:
        """Take what a step gave; returns whether the row has ended."""
        answer = self.answers.setdefault(output.index, _Answer())
        answer.text.append(output.text)
        answer.token_ids += output.token_ids
        if output.logprobs is not None:
            answer.logprobs = answer.logprobs or []
            answer.logprobs += _plain(output.logprobs)
        if output.prompt_logprobs is not None:  # each answer brings the same ones
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
    """Log-probabilities as JSON knows them."""
    return [None if logprob is None else _finite(asdict(logprob)) for logprob in logprobs]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Writer:
    """Appends whole lines, or takes back what of one was written."""

    def __init__(self, file: BinaryIO, out: Path) -> None:
        self._file = file
        self._out = out
        self._end = os.fstat(file.fileno()).st_size

    def write(self, result: dict[str, Any]) -> None:
        try:
            line = json.dumps(result, ensure_ascii=False, allow_nan=False).encode("utf-8")
        except UnicodeEncodeError:  # half a surrogate pair can only be escaped
            line = json.dumps(result, allow_nan=False).encode("ascii")
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise LeanError(f"cannot write {self._out}: {error.strerror or error}") from error
        self._end += len(line) + 1

    def take_back(self) -> None:
        self._file.truncate(self._end)


class _Progress:
    """Rows done, speed and time left: a bar on a terminal, else a plain line now and then."""

    def __init__(self, console: Console, total: int, skipped: int) -> None:
        self._console, self._total, self._skipped = console, total, skipped
        self._started = self._said = time.perf_counter()
        self.bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows{task.fields[pace]}", markup=False))
            self.bar = Progress(*columns, console=console, transient=True, redirect_stdout=False)
            self._task = self.bar.add_task("", total=total, completed=skipped, pace="")

    def show(self, ended: int, tokens: int) -> None:
        """``ended`` rows and ``tokens`` of this run, those of unfinished rows too."""
        now = time.perf_counter()
        seconds, done = now - self._started, self._skipped + ended
        rate = tokens / seconds if seconds else 0.0
        pace = f", {rate:,.{0 if rate >= 10 else 1}f} tokens/s"
        if ended:
            pace += f", {_duration(seconds / ended * (self._total - done))} left"
        if self.bar:
            self.bar.update(self._task, completed=done, pace=pace)
        elif now - self._said >= LINE_EVERY_S:
            self._said = now
            _say(self._console, f"{done} of {self._total} rows{pace}")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def run_batch(
    llm: LLM, rows: list[Row], out: Path, params: SamplingParams, chat: bool | None, console: Console
) -> BatchSummary:
    """Answer the rows that are not in ``out`` yet, and append each to it as a line of JSON the moment it ends.

    A row that cannot be served, or whose numbers become non-finite, is written with an "error", and the others go on.
    Whatever else ends the run, an interrupt too, leaves whole lines only: the same call goes on from there.

    Args:
        params: what rows without parameters of their own use.
        chat: see `lean.prompt.encode_prompt`; rows with messages are always chats.
        console: where progress is shown.

    Raises:
        LeanError: the file cannot be written, or the engine failed.
    """
    out = Path(out)
    with _open_results(out) as (file, done):
        todo = deque(row for row in rows if row.id not in done)
        skipped = len(rows) - len(todo)
        if not todo:
            _say(console, f"nothing to do: all {len(rows)} rows are in {out}")
            return BatchSummary(0, skipped, 0, 0, 0.0)
        writer = _Writer(file, out)
        progress = _Progress(console, len(rows), skipped)
        running: dict[int, _Running] = {}
        answered = failed = tokens = 0
        started = time.perf_counter()
        with progress.bar or nullcontext():
            try:
                while todo or running:
                    while todo and len(running) < 2 * llm.config.max_num_seqs:
                        request = _Running(todo.popleft())
                        try:
                            running[request.start(llm, params, chat)] = request
                        except RequestError as error:
                            request.error = str(error)
                            writer.write(request.as_json())
                            failed += 1
                    outputs = llm.step() if running else []
                    for output in outputs:
                        if output.request_id not in running:
                            continue
                        request = running[output.request_id]
                        tokens += len(output.token_ids)
                        if request.add(output):
                            writer.write(request.as_json())
                            del running[output.request_id]
                            failed += request.error is not None
                            answered += request.error is None
                    if running and not outputs and not llm.has_work:
                        raise EngineError(f"the engine lost {len(running)} requests")
                    progress.show(answered + failed, tokens)
            except BaseException:
                writer.take_back()
                for request_id in running:
                    llm.abort(request_id)
                _say(console, f"{skipped + answered + failed} of {len(rows)} rows are in {out}: run again to go on")
                raise
        return BatchSummary(answered, skipped, failed, tokens, time.perf_counter() - started)
