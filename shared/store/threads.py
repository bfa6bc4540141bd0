"""Where drivers block: a few threads, so that the loop never does, and no more work begun than there are threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shared.runtime.errors import StoreUnavailable

T = TypeVar("T")
_MAX_WAITING = 1024


class StoreThreads:
    """At most `num_threads` calls run and `max_waiting` wait; what is more is refused."""

    def __init__(self, num_threads: int, name: str, max_waiting: int = _MAX_WAITING) -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._free = asyncio.Semaphore(num_threads)
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._running: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """Its result or exception, once it has ended, also where the caller is cancelled meanwhile: until then it uses
        the caller's memory. Raises StoreUnavailable where too many wait, and after `close`."""
        await self._enter()
        try:
            if self._closed:
                raise StoreUnavailable("the store's driver is closed")
            return await self._run(work)
        finally:
            self._free.release()

    async def close(self) -> None:
        """Returns when what runs has ended; what waits is refused. Idempotent."""
        self._closed = True
        while self._running:
            await asyncio.wait(self._running)
        self._pool.shutdown()

    async def _enter(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store's driver is closed")
        if self._free.locked() and self._num_waiting >= self._max_waiting:
            raise StoreUnavailable(f"{self._num_waiting} calls wait for the store's device already")
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1

    async def _run(self, work: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _ended(future)
            raise


async def _ended(future: "asyncio.Future[T]") -> None:
    """However often the waiter is cancelled."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    future.exception()
