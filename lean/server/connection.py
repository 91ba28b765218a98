"""One HTTP connection: uvicorn's, with time limits for slow clients and OpenAI's errors for broken requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lean.server.config import ServerConfig
from lean.server.errors import ApiError


class Connection(H11Protocol):
    """h11 checks the size of heads; httptools, uvicorn's other parser, does not.

    - A client that does not finish the head of a request in ``read_timeout`` seconds gets 408.
    - A client that reads nothing for ``write_timeout`` seconds is disconnected, and its request ends.
    """

    read_timeout = write_timeout = 60.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel(self._head_timer)
        self._cancel(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:  # this was a part of the next head
            if self._head_timer is None:
                self._expect_head()
        else:
            self._cancel(self._head_timer)
            self._head_timer = None

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.read_timeout, self._head_is_late)

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self._refuse(ApiError(408, f"the head of the request did not arrive within {self.read_timeout:g} s"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel(self._write_timer)
        super().resume_writing()

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "the request is not valid HTTP, or its head is too large"))

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, and close."""
        headers = [("content-type", "application/json"), ("content-length", str(len(error.json)))]
        with suppress(h11.LocalProtocolError):  # an answer to an earlier request is on its way
            response = h11.Response(status_code=error.status, headers=[*headers, ("connection", "close")])
            for event in (response, h11.Data(data=error.json), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def connection_class(config: ServerConfig) -> type[Connection]:
    """The class with the limits of a configuration, as uvicorn makes its objects itself."""
    limits = {"read_timeout": config.read_timeout, "write_timeout": config.write_timeout}
    return type("Connection", (Connection,), limits)
