"""Kinds of fields: what a JSON value must be, and how OpenAPI describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema
from pydantic_core import PydanticCustomError

MOST_INT = 2**63 - 1


class Wire(BaseModel):
    """A JSON object. Types are exact: no text for a number, no 1.5 for 1. Fields that it does not name are kept."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _kind(schema: dict[str, Any], what: str, fits: Callable[[Any], bool], required: bool = False) -> Any:
    """A field whose value ``fits``, or is null unless ``required``; ``what`` says so in an error."""

    def check(value: Any) -> Any:
        if not (fits(value) or (value is None and not required)):
            raise PydanticCustomError("lean", f"must be {what}")
        return value

    described = schema if required else {"anyOf": [schema, {"type": "null"}]}
    return Annotated[Any, BeforeValidator(check), WithJsonSchema(described)]


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def is_ids(value: Any) -> bool:
    """Whether a value is a list of numbers that may be token ids."""
    return isinstance(value, list) and all(type(token) is int and 0 <= token <= MOST_INT for token in value)


def _prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and (_texts(value) or is_ids(value) or all(map(is_ids, value)))


def _content(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, Mapping) for part in value))


_TEXT: dict[str, Any] = {"type": "string"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _list(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


Stop = _kind(
    {"anyOf": [{**_TEXT, "minLength": 1}, _list({**_TEXT, "minLength": 1})]},
    "a string or a list of strings, none of them empty",
    lambda value: bool(value) if isinstance(value, str) else _texts(value) and all(value),
)
LogitBias = _kind(
    {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "an object of numbers from -100 to 100 by token id",
    lambda value: isinstance(value, dict) and all(type(x) in (int, float) and abs(x) <= 100 for x in value.values()),
)
Prompt = _kind(
    {"anyOf": [_TEXT, _list(_TEXT, 1), {**_IDS, "minItems": 1}, _list(_IDS, 1)]},
    "a string, a list of strings, a list of token ids, or a list of such lists",
    _prompt,
    required=True,
)
Content = _kind({"anyOf": [_TEXT, _list({"type": "object"})]}, "a string or a list of content parts", _content)
TokenIds = _kind(_IDS, "a list of token ids", is_ids)
RequiredTokenIds = _kind(_IDS, "a list of token ids", is_ids, required=True)
