"""Run the server on a socket until it is told to stop."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from lean.errors import ConfigError, one_line
from lean.server.app import make_app
from lean.server.config import ServerConfig
from lean.server.connection import connection_class
from lean.server.service import Service
from lean.server.tls import server_context

KEEP_ALIVE_S = 75  # longer than clients keep idle connections: who closes last meets no reset
SWITCH_S = 0.001  # how long a thread may keep the interpreter while another one wants it


class _Server(uvicorn.Server):
    """Leaves signals to the command."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield


def listen(config: ServerConfig) -> socket.socket:
    """A socket on the address of the configuration. Raises ConfigError where there can be none."""
    where = f"{config.host} port {config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        one = socket.socket(family, kind, protocol)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
        one.listen(1024)
        return one
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(f"cannot listen on {where}: {why}") from None


def url_of(one: socket.socket, config: ServerConfig) -> str:
    """Where clients on this machine reach the server."""
    host, port = one.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def uvicorn_config(service: Service) -> uvicorn.Config:
    """uvicorn's options. Raises ConfigError for certificates that cannot be used."""
    config = service.config
    made = uvicorn.Config(
        make_app(service),
        http=connection_class(config),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=config.max_header_size,
    )
    made.load()
    if config.ssl_certfile and config.ssl_keyfile:
        made.ssl = server_context(config.ssl_certfile, config.ssl_keyfile)
    return made


async def run(service: Service, one: socket.socket) -> None:
    """Serve until `Service.stop`, or until the engine ends by itself: `Service.error` then says why."""
    server = _Server(uvicorn_config(service))
    kept = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        service.engine.start()
        serving = asyncio.create_task(server.serve(sockets=[one]))
        await service.wait_for_end()
        server.should_exit = True
        await serving
    finally:
        sys.setswitchinterval(kept)
        service.close()
