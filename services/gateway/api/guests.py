"""The generation requests in hand: how many there may be, and how they end when the gateway goes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from shared.runtime.errors import QueueFull, ShuttingDown

_RETRY_AFTER_S = 1.0


class Guests:
    """`close` lets nobody in any more, `gone` waits for those inside, `evict` ends them with ShuttingDown."""

    def __init__(self) -> None:
        self.num_inside = 0
        self._closed = False
        self._evicted = False
        self._seats: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def admitted(self, limit: int) -> Iterator[None]:
        """Around a whole request, from before its body is read. Raises ShuttingDown or QueueFull at the door."""
        if self._closed:
            raise ShuttingDown("this gateway is shutting down", retry_after_s=_RETRY_AFTER_S)
        if self.num_inside >= limit:
            raise QueueFull(f"{self.num_inside} requests are in hand", retry_after_s=_RETRY_AFTER_S)
        self.num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if self.num_inside == 0:
                self._empty.set()

    @asynccontextmanager
    async def seated(self) -> AsyncIterator[None]:
        """Around what `evict` may cut short: it then raises ShuttingDown."""
        if self._evicted:
            raise _evicted()
        try:
            async with asyncio.timeout(None) as seat:
                self._seats.add(seat)
                try:
                    yield
                finally:
                    self._seats.discard(seat)
        except TimeoutError as error:
            if not seat.expired():
                raise
            raise _evicted() from error

    def close(self) -> None:
        self._closed = True

    async def gone(self) -> None:
        await self._empty.wait()

    def evict(self) -> None:
        self._closed = self._evicted = True
        now = asyncio.get_running_loop().time()
        for seat in list(self._seats):
            seat.reschedule(now)


def _evicted() -> ShuttingDown:
    return ShuttingDown("this gateway shut down before the answer was complete", retry_after_s=_RETRY_AFTER_S)
