"""A file of prompts, one JSON object per line. It is checked before anything runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from lean.errors import EMPTY_PROMPT, RequestError, one_line
from lean.sampling_params import SamplingParams
from lean.text.prompt import ROLES

PARAMS = frozenset(item.name for item in fields(SamplingParams))

RowId = str | int


@dataclass(frozen=True)
class Row:
    """One line of the file: a text or chat messages, and sampling parameters that override those of the command."""

    id: RowId
    prompt: str | None
    messages: list[dict[str, str]] | None
    params: dict[str, Any]


def read_rows(path: Path, params: SamplingParams | None = None) -> list[Row]:
    """Read and check a file of prompts. ``params``: the command's sampling parameters, which rows override.

    Raises:
        RequestError: the file cannot be read or has no rows, or a line is not a row. The message names the line.
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
                        raise RequestError(f"id {shown(row.id)} is already used in line {lines[row.id]}")
                except RequestError as error:
                    raise RequestError(f"{path} line {number}: {error}") from None
                lines[row.id] = number
                rows.append(row)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise RequestError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not rows:
        raise RequestError(f'{path} has no rows: write one JSON object per line, e.g. {{"prompt": "Hello"}}')
    return rows


def _read_row(line: bytes, number: int, params: SamplingParams) -> Row:
    values = read_object(line)
    for key in values:
        if key not in PARAMS and key not in ("id", "prompt", "messages"):
            known = ", ".join(["id", "prompt", "messages", *sorted(PARAMS)])
            raise RequestError(f"unknown key {shown(key)}; known keys are {known}")
    if ("prompt" in values) == ("messages" in values):
        raise RequestError(
            "give prompt or messages, not both" if "prompt" in values else "prompt or messages is missing"
        )
    row_id = values.get("id", number)
    if not is_id(row_id):
        raise RequestError(f"id must be a string or a whole number, not {shown(row_id)}")
    prompt, messages = values.get("prompt"), values.get("messages")
    if "prompt" in values:
        if not isinstance(prompt, str):
            raise RequestError(f"prompt must be a string, not {shown(prompt)}")
        if not prompt:
            raise RequestError(EMPTY_PROMPT)
    else:
        _check_messages(messages)
    own = {key: value for key, value in values.items() if key in PARAMS}
    replace(params, **own)  # checks them
    return Row(row_id, prompt, messages, own)


def read_object(line: bytes) -> dict[str, Any]:
    """A line as a JSON object. Raises RequestError."""

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        values = json.loads(line.decode("utf-8"), parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 text: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, thousands of brackets
        raise RequestError(f"not JSON that lean can read: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise RequestError(f"must be a JSON object, not {shown(values)}")
    return values


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a list with at least one message, not {shown(messages)}")
    for place, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                found = shown(message)
                raise RequestError(f"messages[{place}] must be an object whose {key} is a string, not {found}")
        if message["role"] not in ROLES:
            role = shown(message["role"])
            raise RequestError(f"messages[{place}] has the role {role}: must be one of {', '.join(ROLES)}")


def is_id(value: object) -> TypeGuard[RowId]:
    return isinstance(value, str | int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A JSON value, cut to fit into a message."""
    return one_line(json.dumps(value), 60)
