"""What blocks take in a server that others use as well: counted here, as far as this process was told."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from weakref import WeakValueDictionary

from shared.runtime.errors import StoreFull


class Sizes:
    """limit_bytes: what they may take in all."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._coming_bytes = 0
        self._sizes: dict[bytes, int] = {}
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def set(self, key: bytes, num_bytes: int) -> None:
        """0: it is not there."""
        self.used_bytes += num_bytes - self._sizes.pop(key, 0)
        if num_bytes:
            self._sizes[key] = num_bytes

    @asynccontextmanager
    async def alone(self, key: bytes) -> AsyncIterator[None]:
        """What changes one key goes one after the other: else it would not be known here which came last there."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            yield

    @contextmanager
    def coming(self, key: bytes, num_bytes: int) -> Iterator[None]:
        """While a block is put, in place of what is there under its key. Raises StoreFull where there is no room."""
        more = num_bytes - self._sizes.get(key, 0)
        if self.limit_bytes is not None and self.used_bytes + self._coming_bytes + more > self.limit_bytes:
            raise StoreFull(f"{self.limit_bytes} bytes are all that blocks may take")
        more = max(0, more)
        self._coming_bytes += more
        try:
            yield
        finally:
            self._coming_bytes -= more
        self.set(key, num_bytes)
