"""The application: the routes of the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from lean.server.answer import Answer
from lean.server.errors import OWN_FAULT, ApiError
from lean.server.guard import Guard, cache_salt
from lean.server.metrics import CONTENT_TYPE
from lean.server.openapi import describe
from lean.server.prepare import Preparer
from lean.server.service import Phase
from lean.units import ENDLESS

if TYPE_CHECKING:
    from lean.server.prepare import Prepared
    from lean.server.service import Service


def make_app(service: Service) -> ASGIApp:
    """The ASGI application of a service."""
    app = FastAPI(title="lean", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _own_fault)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_operation(app, service)
    return Guard(app, service)


def _add_generation(app: FastAPI, service: Service) -> None:
    async def answer(request: Request, prepare: Callable[[Preparer, bytes], Prepared]) -> Response:
        service.admit()
        admitted = 1
        try:
            body = await read_body(request, service)
            prepared = await service.preparer.run(prepare, body)
            service.admit(len(prepared.prompts) - 1)
            admitted = len(prepared.prompts)
            service.metrics.ignored(prepared.unknown)
            return Answer(service, prepared, cache_salt(request.scope, prepared.cache_salt))
        except BaseException:
            service.release(admitted)
            raise

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(request, Preparer.chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue prompts of text or token ids."""
        return await answer(request, Preparer.completion)


def _add_tokens(app: FastAPI, service: Service) -> None:
    async def tokens(request: Request, convert: Callable[[Preparer, bytes], Any]) -> Response:
        service.admit()
        try:
            return JSONResponse(await service.preparer.run(convert, await read_body(request, service)))
        finally:
            service.release(1)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        return await tokens(request, Preparer.tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        return await tokens(request, Preparer.detokenize)


def _add_operation(app: FastAPI, service: Service) -> None:
    def model(name: str) -> dict[str, Any]:
        length = service.preparer.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "lean",
            "max_model_len": None if length == ENDLESS else length,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        """The names of the model that is served."""
        return JSONResponse({"object": "list", "data": [model(name) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """One of them."""
        return JSONResponse(model(service.preparer.check_model(name)))

    @app.get("/health")
    async def health() -> Response:
        """200 if requests are served; 503 while the model is loading and while the server ends."""
        return JSONResponse({"status": service.phase.value}, 200 if service.phase is Phase.READY else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    description = describe(app)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """This API in OpenAPI's words."""
        return JSONResponse(description)


async def read_body(request: Request, service: Service) -> bytes:
    """The body of a request. Raises ApiError: too large, too slow, or cut off."""
    config = service.config
    too_large = ApiError(413, f"the body is larger than {config.max_body_size} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > config.max_body_size:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(config.read_timeout):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "the body was cut off")
                body += message.get("body", b"")
                if len(body) > config.max_body_size:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {config.read_timeout:g} s") from None


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    closing = {"connection": "close"} if error.status in (408, 413) else {}  # the rest of the body is not read
    return Response(error.json, error.status, {**error.headers, **closing}, "application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path, or another method."""
    assert isinstance(error, HTTPException)
    unknown = error.status_code == 404
    known = ApiError(
        error.status_code, "there is nothing at this path" if unknown else "the method is not allowed here"
    )
    return Response(known.json, known.status, error.headers, "application/json")


async def _own_fault(request: Request, error: Exception) -> Response:
    return Response(ApiError(500, OWN_FAULT).json, 500, media_type="application/json")
