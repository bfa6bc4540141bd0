"""A driver that can be told to fail, to wait, and to be full."""

import asyncio
from collections.abc import AsyncIterator
from typing import ClassVar

import xxhash

from shared.runtime.errors import StoreFull, StoreUnavailable
from shared.store.driver import BlockRecord, Parts


class DictDriver:
    """Blocks in a dictionary that outlives the kvstore. fails: what every call raises. gate: calls wait for it."""

    name: ClassVar[str] = "dict"
    durability: ClassVar[str] = "as long as the test"

    def __init__(self, limit: int | None = None) -> None:
        self.blocks: dict[bytes, tuple[BlockRecord, bytes]] = {}
        self.limit = limit
        self.fails: StoreUnavailable | StoreFull | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.gets = 0

    async def open(self) -> None: ...

    async def records(self) -> AsyncIterator[BlockRecord]:
        for record, _ in list(self.blocks.values()):
            yield record

    async def put(self, record: BlockRecord, parts: Parts) -> None:
        await self._pause()
        content = b"".join(parts)
        assert record.digest == xxhash.xxh3_128_digest(content)
        assert record.num_bytes == len(content)
        if self.limit is not None and self.usage()[0] + len(content) > self.limit:
            raise StoreFull("the dictionary is full")
        self.blocks[record.key] = record, content

    async def get(self, key: bytes, namespace: str, into: Parts) -> BlockRecord | None:
        self.gets += 1
        await self._pause()
        record, content = self.blocks.get(key, (None, b""))
        if record is None or record.namespace != namespace or len(content) != sum(map(len, into)):
            return None
        if xxhash.xxh3_128_digest(content) != record.digest:
            del self.blocks[key]
            return None
        at = 0
        for part in into:
            part[:] = content[at : at + len(part)]
            at += len(part)
        return record

    async def delete(self, key: bytes) -> None:
        await self._pause()
        self.blocks.pop(key, None)

    def usage(self) -> tuple[int, int | None]:
        return sum(len(content) for _, content in self.blocks.values()), self.limit

    async def close(self) -> None: ...

    def damage(self, key: bytes) -> None:
        record, content = self.blocks[key]
        self.blocks[key] = record, bytes([content[0] ^ 1]) + content[1:]

    async def _pause(self) -> None:
        await self.gate.wait()
        if self.fails is not None:
            raise self.fails
