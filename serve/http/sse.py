"""Answers whose client may vanish: server-sent events, and plain ones that are computed while somebody listens."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.http.errors import as_api_error, error_body

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
CLIENT_GONE = 499  # nobody reads it; it marks the log


def event(data: Mapping[str, Any]) -> bytes:
    return f"data: {_encode(data)}\n\n".encode()


class EventStream(Response):
    """Sends events as they come and a comment where none comes for `keep_alive` seconds.

    A client that goes away closes the events at once, whatever they wait for. An error becomes the last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[Mapping[str, Any]],
        rest: AsyncGenerator[Mapping[str, Any], None],
        keep_alive: float,
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest, self._keep_alive = first, rest, keep_alive
        self._last = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ticker = asyncio.create_task(self._comment(send))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._last = time.monotonic()
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            ticker.cancel()
            self._first.cancel()
            await asyncio.gather(ticker, self._first, return_exceptions=True)
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        try:
            await self._send(send, event(await self._first))
            async for data in self._rest:
                await self._send(send, event(data))
        except Exception as error:
            await self._send(send, event(error_body(as_api_error(error))))
        await self._send(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._last = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _comment(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._keep_alive / 2)
            if self._last and time.monotonic() - self._last >= self._keep_alive:
                await self._send(send, COMMENT)


async def stream_response(
    request: Request, events: AsyncGenerator[Mapping[str, Any], None], keep_alive: float
) -> Response:
    """An event stream whose errors before the first event are real status codes.

    It waits for the first event, or `keep_alive` seconds: from then on the client gets comments, and errors as events.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await unless_gone(request.receive, asyncio.wait({first}, timeout=keep_alive))
        if first.done():
            first.result()
    except BaseException as error:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
        if isinstance(error, ClientGone):
            return Response(status_code=CLIENT_GONE)
        raise
    return EventStream(first, events, keep_alive)


class ClientGone(Exception):
    """The client closed its connection."""


async def plain_response(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of the work, which is cancelled when the client goes away."""
    try:
        return await unless_gone(request.receive, work)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)


async def unless_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, or ClientGone; the work has ended either way."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
