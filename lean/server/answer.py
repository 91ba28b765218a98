"""An answer on its way: it gives a request to the engine, and sends what comes of it, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lean.server.choice import Choice
from lean.server.errors import ENGINE_FAILED, ApiError
from lean.server.frames import DONE, WAITING, Frames, event
from lean.server.loop import Job, Part
from lean.server.pieces import encode, in_blocks, pieces
from lean.server.service import new_id
from lean.server.shapes import usage
from lean.server.silence import Silence

if TYPE_CHECKING:
    from lean.server.prepare import Prepared
    from lean.server.service import Service

log = logging.getLogger("lean")

AT_ONCE = 64  # outputs whose frames are encoded before others have their turn
PING_S = 10.0  # a stream never says nothing for longer


class ClientLeft(Exception):
    """Nobody reads the answer any more."""


class Answer(Response):
    """Serves one prepared request. `Service.admit` has counted its prompts; this object releases them.

    It watches the connection all the time: when the client leaves, the request ends after the running step.
    """

    def __init__(self, service: Service, prepared: Prepared, cache_salt: str | None = None) -> None:
        super().__init__()
        self._service, self._prepared = service, prepared
        self._job = Job(prepared.prompts, prepared.params, cache_salt)
        self._choices = [
            Choice(index, prepared, service.vocabulary) for index in range(len(prepared.prompts) * prepared.params.n)
        ]
        self._begun = False
        kind, name = ("chatcmpl", "chat.completion") if prepared.chat else ("cmpl", "text_completion")
        self._head = {
            "id": new_id(kind),
            "object": f"{name}.chunk" if prepared.chat and prepared.stream else name,
            "created": int(time.time()),
            "model": prepared.model,
            "system_fingerprint": service.fingerprint,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer on an ASGI connection."""
        service, job = self._service, self._job
        self._follow = service.metrics.follow(job)
        complete = False
        service.engine.submit(job)
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await job.accepted()
            await (self._stream(send) if self._prepared.stream else self._whole(send))
            complete = True
        except ClientLeft:
            pass
        except ApiError as error:
            await self._send_error(send, error)
        finally:
            watcher.cancel()
            service.engine.cancel(job)
            service.release(len(self._prepared.prompts))
            self._follow.end(time.monotonic(), aborted=not complete)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._service.engine.cancel(self._job)
        self._job.fail(ClientLeft())

    def _take(self, part: Part) -> Choice:
        """Count a part. Raises ApiError if the sequence failed."""
        self._follow.add(part)
        if part.output.error is not None:
            log.error("a request failed: %s", part.output.error)
            raise ApiError(500, ENGINE_FAILED)
        return self._choices[part.prompt * self._prepared.params.n + part.output.index]

    # --- whole ---

    async def _whole(self, send: Send) -> None:
        while parts := await self._job.parts():
            for part in parts:
                self._take(part).add(part.output)
        body = await self._service.beside(self._body) if self._has_logprobs else self._body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % sum(map(len, body)))]
        await self._start(send, 200, headers)
        for block in body[:-1]:
            await self._write(send, block)
        await self._write(send, body[-1], more=False)

    @property
    def _has_logprobs(self) -> bool:
        """Whether the answer may be so large that it takes seconds to make."""
        params = self._prepared.params
        return params.logprobs is not None or params.prompt_logprobs is not None

    def _body(self) -> list[bytes]:
        """The whole answer in blocks. Where there are log-probabilities, called in a thread beside the event loop."""

        def parts() -> Iterator[bytes]:
            before = encode(self._head)[:-1] + b',"choices":['
            for choice in self._choices:
                yield before
                yield from pieces(choice.whole())
                before = b","
            yield b'],"usage":' + encode(self._usage())
            for key, value in (self._choices[0].prompt_logprobs() if self._prepared.chat else {}).items():
                yield b"," + encode(key) + b":"
                yield from pieces(value)
            yield b"}"

        return in_blocks(parts())

    def _usage(self) -> dict[str, Any]:
        """Of all choices together, as far as they are. The tokens of a prompt count once."""
        n = self._prepared.params.n
        return usage(
            sum(map(len, self._prepared.prompts)),
            sum(choice.completion_tokens for choice in self._choices),
            sum(choice.cached_tokens for choice in self._choices[::n]),
        )

    # --- a stream ---

    async def _stream(self, send: Send) -> None:
        prepared = self._prepared
        frames = Frames(self._head, prepared.chat, prepared.include_usage or prepared.usage_in_chunks)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))  # nginx would collect frames
        await self._start(send, 200, headers)  # it goes out now, before the prompt has been computed
        begun: set[int] = set()
        silence = Silence(PING_S, self._job.wake)
        try:
            while (parts := await self._job.parts()) or not self._job.ended:
                for start in range(0, len(parts) or 1, AT_ONCE):  # a slow reader may have many of them waiting
                    some = parts[start : start + AT_ONCE]
                    data = b"".join([await self._frames_of(part, frames, begun) for part in some]) if some else WAITING
                    if data:
                        silence.end()
                        await self._write(send, data)
                    if len(parts) > AT_ONCE:
                        await asyncio.sleep(0)  # others have their turn
        finally:
            silence.stop()
        last = frames.usage(self._usage()) if prepared.include_usage else b""
        await self._write(send, last + DONE, more=False)

    async def _frames_of(self, part: Part, frames: Frames, begun: set[int]) -> bytes:
        choice = self._take(part)
        first = choice.index not in begun
        begun.add(choice.index)
        if first and self._prepared.echo and self._has_logprobs:  # of the whole prompt
            return await self._service.beside(self._frame, part, frames, choice, first)
        return self._frame(part, frames, choice, first)

    def _frame(self, part: Part, frames: Frames, choice: Choice, first: bool) -> bytes:
        each = self._prepared.usage_in_chunks
        data = b""
        if first and self._prepared.chat:
            choice.cached_tokens = part.output.cached_tokens
            data = frames.role(choice.index, self._usage() if each else None)
        piece = choice.add(part.output)
        if piece.text or piece.finish_reason is not None or piece.logprobs is not None:
            data += frames.piece(choice.index, piece, self._usage() if each else None)
        return data

    async def _start(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        await send({"type": "http.response.start", "status": status, "headers": headers})

    @staticmethod
    async def _write(send: Send, data: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_error(self, send: Send, error: ApiError) -> None:
        """An answer of its own, or the last event of a stream that has begun."""
        if self._begun:
            await self._write(send, event(error.json) + DONE, more=False)
            return
        headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(error.json))]
        await self._start(send, error.status, headers)
        await self._write(send, error.json, more=False)
