"""What every request passes before its route: Host, key, size of its head, and the server's phase."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lean.server.config import ServerConfig
from lean.server.errors import ApiError

if TYPE_CHECKING:
    from lean.server.service import Service

log = logging.getLogger("lean")

OPEN = ("/health",)  # no key, any Host: for load balancers
SALT = "lean.salt"  # in an ASGI scope: the salt of the request's key
ALWAYS = ("/health", "/metrics", "/openapi.json")  # also while the model is loading, and at the end


class Guard:
    """Plain ASGI middleware."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        keys = [key.encode() for key in service.config.api_key]
        self._digests = [_digest(key) for key in keys]
        self._salts = [_digest(b"salt of the prefix cache: " + key).hex() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] != "http":
            return

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.response(message["status"])
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            await send_error(count, error)
            return
        try:
            await self._app(scope, receive, count)
        except Exception as error:  # uvicorn closes the connection if the answer is not complete
            log.error("internal error at %s", scope["path"], exc_info=error)

    def _check(self, scope: Scope) -> None:
        config, path, headers = self._service.config, scope["path"], dict(scope["headers"])
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])  # with ": " and the line's end
        if size + len(scope["raw_path"]) + len(scope["query_string"]) > config.max_header_size:
            raise ApiError(400, f"the head of the request is larger than {config.max_header_size} bytes")
        if path not in OPEN:
            check_host(headers.get(b"host", b""), config)
            check_origin(headers.get(b"origin"), config)
            scope[SALT] = self._check_key(headers.get(b"authorization", b""))
        if path not in ALWAYS:
            self._service.check_phase()

    def _check_key(self, header: bytes) -> str | None:
        """The salt of the key; None where the server has no keys. Raises ApiError for another key, or none."""
        if not self._digests:
            return None
        scheme, _, key = header.partition(b" ")
        given = _digest(key.strip())
        # All of them: the time says nothing about which one it is.
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(known):
            message = "the key is not valid" if header else "a key is needed: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")
        return next(salt for salt, is_given in zip(self._salts, known) if is_given)


def cache_salt(scope: MutableMapping[str, Any], own: str | None) -> str | None:
    """With whom a request shares the prefix cache: those with the same key and the same salt of their ``own``."""
    key = scope.get(SALT)
    return own if key is None else f"{key}/{own or ''}"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def check_host(header: bytes, config: ServerConfig) -> None:
    """Raise ApiError for a Host that is neither an IP address, nor localhost, nor allowed.

    A page of another site can point its own name at this machine (DNS rebinding), but then the Host is that name.
    """
    if header and not _is_allowed(header.decode("latin-1"), config):
        raise ApiError(403, "the Host header names another host: allow it with --allowed-host", code="host_not_allowed")


def check_origin(header: bytes | None, config: ServerConfig) -> None:
    """Raise ApiError for a request from a page of another site: it could not read the answer, but have it computed.

    Only browsers send the header.
    """
    if header is not None and not _is_allowed(header.decode("latin-1").rpartition("://")[2], config):
        raise ApiError(
            403, "a page of another site sent this: allow its host with --allowed-host", code="origin_not_allowed"
        )


def host_name(header: str) -> str:
    """The name of a Host header, in lower case, without port and brackets."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0].rstrip(".") if ":" in text else text.rstrip(".")


def _is_allowed(header: str, config: ServerConfig) -> bool:
    """Whether a Host header, or an Origin without its scheme, names this machine or an allowed host."""
    if "*" in config.allowed_host:
        return True
    name = host_name(header)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        allowed = {"localhost", config.host.lower(), *(host.lower().rstrip(".") for host in config.allowed_host)}
        return name.endswith(".localhost") or name in allowed
    return True


async def send_error(send: Send, error: ApiError) -> None:
    """Answer with an error, and close the connection: the body may not have been read."""
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(error.json))]
    await send(
        {"type": "http.response.start", "status": error.status, "headers": [*headers, (b"connection", b"close")]}
    )
    await send({"type": "http.response.body", "body": error.json})
