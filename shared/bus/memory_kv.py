"""JetStream's key-value memory, inside one process and on the loop's own clock."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.bus.kv import Bucket, Entry, KvConflict, KvFull, check_entry


@dataclass(slots=True)
class MemoryStore:
    """What the server keeps of one bucket."""

    bucket: Bucket
    entries: dict[str, tuple[Entry, float]] = field(default_factory=dict)
    revision: int = 0

    def find(self, key: str) -> Entry | None:
        now = asyncio.get_running_loop().time()
        found = self.entries.get(key)
        if found is not None and now - found[1] >= self.bucket.ttl_s:
            del self.entries[key]
            return None
        return None if found is None else found[0]

    def write(self, key: str, value: bytes) -> int:
        others = sum(len(entry.value) for other, (entry, _) in self.entries.items() if other != key)
        if others + len(value) > self.bucket.max_bytes:
            raise KvFull(f"{self.bucket.name} holds {others} bytes")
        self.revision += 1
        self.entries[key] = (Entry(value, self.revision), asyncio.get_running_loop().time())
        return self.revision


class MemoryKeyValue:
    """One client's way to a bucket. check: raises where the client has no connection."""

    def __init__(self, store: MemoryStore, check: Callable[[], None]) -> None:
        self._store = store
        self._check = check

    async def get(self, key: str) -> Entry | None:
        await self._reach(key)
        return self._store.find(key)

    async def create(self, key: str, value: bytes) -> int:
        await self._reach(key, value)
        if self._store.find(key) is not None:
            raise KvConflict(f"{key} is there already")
        return self._store.write(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        await self._reach(key, value)
        found = self._store.find(key)
        if found is None or found.revision != revision:
            raise KvConflict(f"{key} is not at revision {revision}")
        return self._store.write(key, value)

    async def delete(self, key: str, revision: int | None = None) -> None:
        await self._reach(key)
        found = self._store.find(key)
        if revision is not None and found is not None and found.revision != revision:
            raise KvConflict(f"{key} is not at revision {revision}")
        self._store.entries.pop(key, None)

    async def _reach(self, key: str, value: bytes = b"") -> None:
        """As over a wire: never before the caller has yielded."""
        check_entry(key, value)
        self._check()
        await asyncio.sleep(0)
        self._check()
