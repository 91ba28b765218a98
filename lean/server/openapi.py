"""The description of the API: what FastAPI knows of the routes, and the fields of their bodies."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from lean.server.fields import Wire
from lean.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[Wire]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    "400": "A field or the request is not valid",
    "401": "No key, or a wrong one",
    "403": "The Host is not allowed",
    "404": "Unknown model or path",
    "408": "The request came too slowly",
    "413": "The body is too large",
    "429": "Too many requests wait",
    "500": "The engine failed",
    "503": "The model is loading, or the server ends",
}


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of an application."""
    document = app.openapi()
    schemas: dict[str, Any] = {"Error": _ERROR}
    for path, item in document["paths"].items():
        for operation in item.values():
            operation["responses"] = {
                "200": {"description": "Success"},
                **{status: _error(text) for status, text in _STATUSES.items()},
            }
            if path in BODIES:
                schema = BODIES[path].model_json_schema(ref_template="#/components/schemas/{model}")
                schemas |= schema.pop("$defs", {})
                schemas[BODIES[path].__name__] = schema
                reference = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    return document


def _error(text: str) -> dict[str, Any]:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
