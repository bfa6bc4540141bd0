"""Blocks in this process's memory: for tests, and where a store is to be fast and may be forgotten."""

from collections.abc import AsyncIterator
from typing import ClassVar, Self

import numpy as np

from shared.runtime.errors import StoreFull
from shared.store.driver import BlockRecord, Parts
from shared.store.options import DriverOptions
from shared.store.parts import digest_of, require_sizes, total_bytes
from shared.store.threads import StoreThreads

_NUM_THREADS = 2


class MemoryDriver:
    name: ClassVar[str] = "memory"
    durability = "Nothing survives the end of the kvstore's process."

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: dict[bytes, tuple[BlockRecord, np.ndarray]] = {}
        self._used_bytes = 0
        self._coming_bytes = 0
        self._threads = StoreThreads(_NUM_THREADS, "store-memory")

    @classmethod
    def from_options(cls, options: DriverOptions) -> Self:
        return cls(options.limit_bytes)

    async def open(self) -> None:
        pass

    async def records(self) -> AsyncIterator[BlockRecord]:
        for record, _ in list(self._blocks.values()):
            yield record

    async def put(self, record: BlockRecord, parts: Parts) -> None:
        require_sizes(record, parts)
        self._make_room(record)
        self._coming_bytes += record.num_bytes
        try:
            held = await self._threads.run(lambda: _copied(parts))
        finally:
            self._coming_bytes -= record.num_bytes
        self._drop(record.key)
        self._blocks[record.key] = (record, held)
        self._used_bytes += record.num_bytes

    async def get(self, key: bytes, namespace: str, into: Parts) -> BlockRecord | None:
        found = self._blocks.get(key)
        if found is None:
            return None
        record, held = found
        if record.namespace != namespace or record.num_bytes != total_bytes(into):
            return None
        if await self._threads.run(lambda: _spread(held, into)) == record.digest:
            return record
        if self._blocks.get(key) is found:
            self._drop(key)
        return None

    async def delete(self, key: bytes) -> None:
        self._drop(key)

    def usage(self) -> tuple[int, int | None]:
        return self._used_bytes, self._limit_bytes

    async def close(self) -> None:
        await self._threads.close()

    def _make_room(self, record: BlockRecord) -> None:
        """Where the old block of this key and the new one do not both fit, the old one goes first."""
        if self._limit_bytes is None:
            return
        over = self._used_bytes + self._coming_bytes + record.num_bytes - self._limit_bytes
        if over <= 0:
            return
        replaced = self._blocks.get(record.key)
        if replaced is None or replaced[0].num_bytes < over:
            raise StoreFull(f"{self._limit_bytes} bytes are all that blocks may take in memory")
        self._drop(record.key)

    def _drop(self, key: bytes) -> None:
        found = self._blocks.pop(key, None)
        if found is not None:
            self._used_bytes -= found[0].num_bytes


def _copied(parts: Parts) -> np.ndarray:
    """numpy copies without the interpreter's lock, so that the loop goes on."""
    held = np.empty(total_bytes(parts), np.uint8)
    start = 0
    for part in parts:
        held[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
        start += part.nbytes
    return held


def _spread(held: np.ndarray, into: Parts) -> bytes:
    """The digest of what the pieces hold then."""
    start = 0
    for part in into:
        np.frombuffer(part, np.uint8)[:] = held[start : start + part.nbytes]
        start += part.nbytes
    return digest_of(into)
