"""Kinds of fields: what a JSON value must be, and how OpenAPI describes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, core_schema

MOST_INT = 2**63 - 1


class Wire(BaseModel):
    """A JSON object. Types are exact: no text for a number, no 1.5 for 1. Fields that it does not name are kept."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


@dataclass(frozen=True)
class Kind:
    """What a field may hold: what ``fits``, and null unless it is ``required``; ``what`` says so in an error.

    `read_body` asks it after the whole body has been read, and after the value's size has been checked. In a validator
    of pydantic a value of a million entries would be looked at first, and be converted a second time for the error.
    """

    what: str
    fits: Callable[[Any], bool]
    required: bool = False

    def allows(self, value: Any) -> bool:
        return self.fits(value) or (value is None and not self.required)


def _kind(schema: dict[str, Any], kind: Kind) -> Any:
    described = schema if kind.required else {"anyOf": [schema, {"type": "null"}]}
    return Annotated[Any, kind, WithJsonSchema(described)]


def kinds_of(model: type[BaseModel]) -> Iterator[tuple[str, Kind]]:
    """The fields of a request that have a kind."""
    for name, field in model.model_fields.items():
        yield from ((name, kind) for kind in field.metadata if isinstance(kind, Kind))


def _texts(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {str}


def is_ids(value: Any) -> bool:
    """Whether a value is a list of numbers that may be token ids."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        return False
    return not value or (min(value) >= 0 and max(value) <= MOST_INT)


def _prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and (_texts(value) or is_ids(value) or all(map(is_ids, value)))


def _bias(value: Any) -> bool:
    return isinstance(value, dict) and all(type(x) in (int, float) and abs(x) <= 100 for x in value.values())


def _content(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, Mapping) for part in value))


TOO_MANY = "too_many"  # type of the error of a field with more entries than it may have


class Tally:
    """Counts the entries of fields while a body is read, and refuses the first one too many.

    pydantic's own limit of a list would make the whole list a part of its error.

    Args:
        most: how many entries a field may have, by its name; one that is not named may have any number.
    """

    def __init__(self, most: Mapping[str, int]) -> None:
        self._most = most
        self._left = dict(most)

    def add(self, name: str) -> None:
        """One more entry of field ``name``. Raises pydantic's error for one too many."""
        if name in self._left:
            self._left[name] -= 1
            if self._left[name] < 0:
                raise PydanticCustomError(TOO_MANY, f"has more than {self._most[name]} entries")


def counted(name: str) -> AfterValidator:
    """Counts each entry of field ``name`` in the `Tally` that is the context of the reading."""

    def count(entry: Any, info: ValidationInfo) -> Any:
        info.context.add(name)  # type: ignore[union-attr]
        return entry

    return AfterValidator(count)


class _FailFast:
    """Ends the reading of an object at its first fault, where pydantic can do that."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema: Any = handler(source)
        if "fail_fast" in signature(core_schema.dict_schema).parameters:
            schema["fail_fast"] = True
        return schema


_TEXT: dict[str, Any] = {"type": "string"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _list(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


Stop = _kind(
    {"anyOf": [{**_TEXT, "minLength": 1}, _list({**_TEXT, "minLength": 1})]},
    Kind(
        "a string or a list of strings, none of them empty",
        lambda value: bool(value) if isinstance(value, str) else _texts(value) and all(value),
    ),
)
LogitBias = Annotated[
    Annotated[dict[Annotated[str, counted("logit_bias")], Any], _FailFast()] | None,
    Kind("an object of numbers from -100 to 100 by token id", _bias),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
                {"type": "null"},
            ]
        }
    ),
]
Prompt = _kind(
    {"anyOf": [_TEXT, _list(_TEXT, 1), {**_IDS, "minItems": 1}, _list(_IDS, 1)]},
    Kind("a string, a list of strings, a list of token ids, or a list of such lists", _prompt, required=True),
)
TokenIds = _kind(_IDS, Kind("a list of token ids", is_ids))
RequiredTokenIds = _kind(_IDS, Kind("a list of token ids", is_ids, required=True))


def _check_content(value: Any) -> Any:
    if not (value is None or _content(value)):
        raise PydanticCustomError("lean", "must be a string or a list of content parts")
    return value


Content = Annotated[
    Any,
    BeforeValidator(_check_content),
    WithJsonSchema({"anyOf": [_TEXT, _list({"type": "object"}), {"type": "null"}]}),
]
