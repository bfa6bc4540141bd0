"""A stream of server-sent events to one client: the headers wait for the first bytes, and a client that does not read
is given up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from shared.runtime.errors import Cancelled

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientGone(Cancelled):
    """The client closed its connection, or stopped reading for too long."""


class EventStream:
    """Owns the response. One write call is one write to the socket."""

    def __init__(self, request: web.Request, write_timeout_s: float) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._response: web.StreamResponse | None = None
        self._preparing = asyncio.Lock()

    @property
    def response(self) -> web.StreamResponse | None:
        """None until the first bytes left: up to then the answer may still become an error with its own status."""
        return self._response

    async def write(self, data: bytes) -> None:
        """Sends, after the headers where it is the first. Waits while the connection's buffer is full.

        ClientGone where nobody reads any more; the connection is closed then.
        """
        if self._response is not None and self._surely_fits(data):
            try:
                await self._response.write(data)
            except ConnectionError as error:
                raise ClientGone from error
            return
        async with self._patience():
            await (await self._prepared()).write(data)

    async def end(self) -> web.StreamResponse:
        """Ends the answer; the connection may serve the next request."""
        async with self._patience():
            response = await self._prepared()
            await response.write_eof()
        return response

    def _surely_fits(self, data: bytes) -> bool:
        """Nothing to wait for, and so no need of a timer: the usual case, once for each token."""
        transport = self._request.transport
        if transport is None:
            return False
        low, _ = transport.get_write_buffer_limits()
        return transport.get_write_buffer_size() + len(data) < low

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                yield
        except ConnectionError as error:
            raise ClientGone from error
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone(f"the client read nothing for {self._write_timeout_s} s") from error

    async def _prepared(self) -> web.StreamResponse:
        async with self._preparing:
            if self._response is None:
                response = web.StreamResponse(headers=_HEADERS)
                await response.prepare(self._request)
                self._response = response
        return self._response
