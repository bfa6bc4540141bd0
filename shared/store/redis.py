"""Blocks in Redis or Valkey, each as one value: its header, then its bytes.

The server makes a value visible whole or not at all. What it evicts, or has forgotten after a restart, is not there.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import ClassVar, Self, TypeVar

import xxhash

from shared.runtime.errors import StoreError, StoreFull, StoreUnavailable
from shared.store.driver import BlockRecord, Parts
from shared.store.options import DriverOptions
from shared.store.parts import batches, require_sizes, total_bytes
from shared.store.record import HEADER_BYTES, VERSION, pack_header
from shared.store.redis_connections import Call, Connections
from shared.store.redis_options import CONFIG_NAMES, RedisOptions, durability_of, texts_of
from shared.store.resp import Refusal, Reply, RespConnection, begun, command
from shared.store.sizes import Sizes
from shared.store.threads import StoreThreads
from shared.store.values import Damaged, key_of, record_of

_log = logging.getLogger(__name__)
_MOST_VALUE_BYTES = 512 << 20
"""What a server takes unless it is configured otherwise."""
_SCAN_COUNT = b"256"
T = TypeVar("T")


class RedisDriver:
    """Implements `BlockDriver`. What counts as used is what this driver listed or put; the server evicts on its own."""

    name: ClassVar[str] = "redis"

    def __init__(self, options: RedisOptions, limit_bytes: int | None = None) -> None:
        self._options = options
        self._sizes = Sizes(limit_bytes)
        self.durability = durability_of({})
        self._prefix = f"{options.prefix}{VERSION}:".encode()
        self._threads = StoreThreads(options.connections, "redis")
        self._connections = Connections(options)
        self._most_bytes = _MOST_VALUE_BYTES
        self._memory_bytes: int | None = None

    @classmethod
    def from_options(cls, options: DriverOptions) -> Self:
        return cls(RedisOptions.parse(options.where), options.limit_bytes)

    async def open(self) -> None:
        async with self._in_time():
            config = await self._do(_config)
        self.durability = durability_of(config)
        self._most_bytes = int(config.get("proto-max-bulk-len", _MOST_VALUE_BYTES))
        self._memory_bytes = int(config.get("maxmemory", 0)) or None
        async for found in self._steps(self._lengths):
            for key, size in found:
                self._sizes.set(key, size)

    async def records(self) -> AsyncIterator[BlockRecord]:
        seen: set[bytes] = set()  # a scan may name a key twice
        async for found in self._steps(self._heads):
            for key, size, header in found:
                try:
                    record = record_of(key, header, size)
                except Damaged as damage:
                    async with self._in_time():
                        await self._drop(key, damage)
                    continue
                self._sizes.set(key, size)
                if key not in seen:
                    seen.add(key)
                    yield record

    async def put(self, record: BlockRecord, parts: Parts) -> None:
        require_sizes(record, parts)
        header, size = pack_header(record), HEADER_BYTES + record.num_bytes
        if size > self._most_bytes:
            raise StoreFull(f"{record.num_bytes} bytes: a value of this server has {self._most_bytes} at most")
        begin = begun(b"SET", self._name(record.key), size=size)
        pieces: list[bytes | memoryview] = [begin, header, *chain.from_iterable(batches(parts)), b"\r\n"]
        async with self._in_time(), self._sizes.alone(record.key):
            with self._sizes.coming(record.key, size):
                await self._do(partial(_expect, pieces))

    async def get(self, key: bytes, namespace: str, into: Parts) -> BlockRecord | None:
        async with self._in_time():
            try:
                found = await self._do(partial(self._get, key, namespace, into))
            except Damaged as damage:
                await self._drop(key, damage)
                return None
            if found is None and key in self._sizes:
                await self._look_again(key)
            return found

    async def delete(self, key: bytes) -> None:
        async with self._in_time():
            await self._delete(key)

    def usage(self) -> tuple[int, int | None]:
        limits = [limit for limit in (self._sizes.limit_bytes, self._memory_bytes) if limit is not None]
        return self._sizes.used_bytes, min(limits, default=None)

    async def close(self) -> None:
        self._connections.close()
        await self._threads.close()
        self._connections.close()  # what came back meanwhile

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        limit_s = self._options.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise StoreUnavailable(f"Redis at {self._options.address} took longer than {limit_s:g} s") from None

    async def _do(self, work: Callable[[RespConnection], T]) -> T:
        """In a thread, with a connection. When the time is over or the caller is cancelled the connection ends, and
        with it the thread's work, before this returns: nothing uses the caller's memory any longer."""
        call = Call()
        return await self._threads.run(partial(self._connections.lend, call, work), on_cancel=call.abort)

    async def _delete(self, key: bytes) -> None:
        async with self._sizes.alone(key):
            await self._do(partial(_expect, [command(b"UNLINK", self._name(key))]))
            self._sizes.set(key, 0)

    async def _drop(self, key: bytes, damage: Damaged) -> None:
        _log.warning("a block in Redis is damaged and dropped: %s", damage)
        await self._delete(key)

    async def _look_again(self, key: bytes) -> None:
        """It may have been evicted."""
        async with self._sizes.alone(key):
            size = await self._do(partial(_expect, [command(b"STRLEN", self._name(key))]))
            self._sizes.set(key, size if isinstance(size, int) else 0)

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _get(self, key: bytes, namespace: str, into: Parts, connection: RespConnection) -> BlockRecord | None:
        connection.send([command(b"GET", self._name(key))])
        size = connection.value()
        if size is None or (isinstance(size, Refusal) and size.code == "WRONGTYPE"):
            return None
        if isinstance(size, Refusal):
            raise _meaning(size)
        record = record_of(key, connection.take(min(size, HEADER_BYTES)), size)
        if record.namespace != namespace or record.num_bytes != total_bytes(into):
            return None
        hasher = xxhash.xxh3_128()
        for batch in batches(into):
            connection.into(batch)
            for piece in batch:
                hasher.update(piece)
        if hasher.digest() != record.digest:
            raise Damaged(f"{key.hex()}: not the bytes that were written")
        return record

    async def _steps(self, look: Callable[[list[bytes], RespConnection], T]) -> AsyncIterator[T]:
        """What `look` finds out of all keys, a few at a time."""
        cursor = b"0"
        while True:
            async with self._in_time():
                cursor, found = await self._do(partial(self._step, cursor, look))
            yield found
            if cursor == b"0":
                return

    def _step(
        self, cursor: bytes, look: Callable[[list[bytes], RespConnection], T], connection: RespConnection
    ) -> tuple[bytes, T]:
        scan = command(b"SCAN", cursor, b"MATCH", self._prefix + b"*", b"COUNT", _SCAN_COUNT)
        match _expect([scan], connection):
            case [bytes() as cursor, list() as names]:
                keys = [key for name in names if isinstance(name, bytes) and (key := self._key(name))]
                return cursor, look(keys, connection)
        raise StoreUnavailable("Redis scans in a way of its own")

    def _lengths(self, keys: list[bytes], connection: RespConnection) -> list[tuple[bytes, int]]:
        connection.send([command(b"STRLEN", self._name(key)) for key in keys])
        answers = [(key, connection.reply()) for key in keys]
        return [(key, size) for key, size in answers if isinstance(size, int)]

    def _heads(self, keys: list[bytes], connection: RespConnection) -> list[tuple[bytes, int, bytes]]:
        """Length and header, both of one value: between two commands another one may come to lie there."""
        begin, end = command(b"MULTI"), command(b"EXEC")
        asked = [
            begin + command(b"STRLEN", name) + command(b"GETRANGE", name, b"0", _LAST) + end
            for name in map(self._name, keys)
        ]
        connection.send(asked)
        found: list[tuple[bytes, int, bytes]] = []
        for key in keys:
            match [connection.reply() for _ in range(4)][-1]:
                case [int() as size, bytes() as header]:
                    found.append((key, size, header))
        return found

    def _key(self, name: bytes) -> bytes | None:
        """Whose name this is; None for names that are not ours."""
        if not name.startswith(self._prefix):
            return None
        return key_of(name[len(self._prefix) :].decode("ascii", "replace"))


_LAST = b"%d" % (HEADER_BYTES - 1)


def _config(connection: RespConnection) -> dict[str, str]:
    """The server's settings, as far as it tells them."""
    connection.send([command(b"CONFIG", b"GET", name.encode()) for name in CONFIG_NAMES])
    found: dict[str, str] = {}
    for _ in CONFIG_NAMES:
        found |= texts_of(connection.reply())
    return found


def _meaning(refusal: Refusal) -> StoreError:
    kind = StoreFull if refusal.code == "OOM" else StoreUnavailable
    return kind(f"Redis refuses: {refusal.message}")


def _expect(words: Sequence[bytes | memoryview], connection: RespConnection) -> Reply:
    """The answer to one command, unless it is a refusal."""
    connection.send(words)
    answer = connection.reply()
    if isinstance(answer, Refusal):
        raise _meaning(answer)
    return answer
