"""Errors of the API: a status, and OpenAI's error object."""

from __future__ import annotations

import json
from typing import Any

from lean.errors import RequestError
from lean.options import SAMPLING_KEYS

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
RETRY_AFTER_S = 2


class ApiError(Exception):
    """A request ends with ``status``. ``param`` names the field at fault, ``code`` is for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, _TYPES[400 if self.status < 500 else 500])
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def json(self) -> bytes:
        return json.dumps(self.body, ensure_ascii=False).encode("utf-8", "backslashreplace")

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def bad_field(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 for a field; the message begins with its name."""
    return ApiError(400, f"{param} {message}", param, code)


def refused(error: RequestError) -> ApiError:
    """What a refusal of the engine or of sampling parameters is in the API. One that begins with an option's name is of
    the field of that name."""
    option, _, rest = str(error).partition(" ")
    field = option.replace("-", "_")
    return bad_field(field, rest) if field in SAMPLING_KEYS else ApiError(400, str(error))


OWN_FAULT = "the server failed while it read this request; its log says why"
ENGINE_FAILED = "the engine failed while it computed this request; the server's log says why"
SHUTTING_DOWN = "the server is shutting down"
LOADING = "the model is still loading"
