"""Blocks in an S3 bucket, each as one object: its header, then its bytes.

The service makes an object visible whole or not at all. Objects travel in one request: what is uploaded in several
leaves its parts behind, and on the bill, when the kvstore dies between them.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar, cast

import numpy as np
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from shared.runtime.errors import StoreError, StoreFull, StoreUnavailable
from shared.store.driver import BlockRecord, Parts
from shared.store.options import DriverOptions
from shared.store.parts import batches, digest_of, require_sizes, total_bytes
from shared.store.record import HEADER_BYTES, VERSION, pack_header
from shared.store.s3_options import S3Options
from shared.store.sizes import Sizes
from shared.store.threads import StoreThreads
from shared.store.values import Damaged, key_of, record_of

if TYPE_CHECKING:
    from obstore import GetOptions

_log = logging.getLogger(__name__)
_MOST_OBJECT_BYTES = 5 << 30
"""What S3 takes in one request."""
_COUNTED_AT_ONCE, _READ_AT_ONCE = 1000, 64
_NUM_THREADS = 2
_FULL = re.compile(r"\b507\b|Insufficient ?Storage|StorageFull|QuotaExceeded|EntityTooLarge|no space left", re.I)
_NO_BUCKET = "NoSuchBucket"
_MESSAGE_LEN = 300
T = TypeVar("T")


class S3Driver:
    """Implements `BlockDriver`. What counts as used is what this driver listed or put."""

    name: ClassVar[str] = "s3"
    durability = (
        "A block that was put is in the S3 service and survives what that service survives; the kvstore's end, and the "
        "loss of its machine, do not touch it."
    )

    def __init__(self, options: S3Options, limit_bytes: int | None = None) -> None:
        self._options = options
        self._sizes = Sizes(limit_bytes)
        self._store = S3Store(
            options.bucket,
            prefix=f"{options.prefix}/{VERSION}",
            config=options.config(),
            client_options=options.client(),
            retry_config=options.retries(),
        )
        self._threads = StoreThreads(_NUM_THREADS, "s3")
        self._free = asyncio.Semaphore(options.requests)
        self._closing = asyncio.Lock()
        self._closed = False

    @classmethod
    def from_options(cls, options: DriverOptions) -> Self:
        return cls(S3Options.parse(options.where), options.limit_bytes)

    async def open(self) -> None:
        async for sizes in self._listed(_COUNTED_AT_ONCE):
            for key, size in sizes.items():
                self._sizes.set(key, size)

    async def records(self) -> AsyncIterator[BlockRecord]:
        async for sizes in self._listed(_READ_AT_ONCE):
            async with self._in_time():
                found = await _all(self._whole(key, size) for key, size in sizes.items())
            for record in found:
                if record is not None:
                    self._sizes.set(record.key, HEADER_BYTES + record.num_bytes)
                    yield record

    async def _listed(self, at_once: int) -> AsyncIterator[dict[bytes, int]]:
        """Sizes of what lies under names of ours."""
        listing = obstore.list(self._store, chunk_size=at_once)
        while True:
            async with self._in_time():
                batch = await self._do(partial(anext, listing, None))
            if batch is None:
                return
            yield {key: meta["size"] for meta in batch if (key := key_of(meta["path"])) is not None}

    async def put(self, record: BlockRecord, parts: Parts) -> None:
        require_sizes(record, parts)
        header, size = pack_header(record), HEADER_BYTES + record.num_bytes
        if size > _MOST_OBJECT_BYTES:
            raise StoreFull(f"a block of {record.num_bytes} bytes: S3 takes {_MOST_OBJECT_BYTES} in one request")
        name, pieces = record.key.hex(), [memoryview(header), *chain.from_iterable(batches(parts))]
        async with self._in_time(), self._sizes.alone(record.key):
            with self._sizes.coming(record.key, size):
                await self._do(lambda: obstore.put_async(self._store, name, pieces, use_multipart=False))

    async def get(self, key: bytes, namespace: str, into: Parts) -> BlockRecord | None:
        async with self._in_time():
            try:
                return await self._get(key, namespace, into)
            except FileNotFoundError:
                if key in self._sizes:
                    await self._look_again(key)
            except Damaged as damage:
                await self._drop(key, damage)
        return None

    async def delete(self, key: bytes) -> None:
        async with self._in_time():
            await self._delete(key)

    def usage(self) -> tuple[int, int | None]:
        return self._sizes.used_bytes, self._sizes.limit_bytes

    async def close(self) -> None:
        self._closed = True
        async with self._closing:
            for _ in range(self._options.requests):
                await self._free.acquire()
            for _ in range(self._options.requests):
                self._free.release()
        await self._threads.close()

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        limit_s = self._options.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise StoreUnavailable(f"{self._options} took longer than {limit_s:g} s") from None

    async def _do(self, work: Callable[[], Awaitable[T]]) -> T:
        """One request, in its turn. FileNotFoundError where the object is not there."""
        async with self._free:
            if self._closed:
                raise StoreUnavailable("the store's driver is closed")
            try:
                return await work()
            except FileNotFoundError as error:
                if _NO_BUCKET in str(error):
                    raise _meaning(error, self._options) from error
                raise
            except BaseError as error:
                raise _meaning(error, self._options) from error

    async def _get(self, key: bytes, namespace: str, into: Parts) -> BlockRecord | None:
        num_bytes = total_bytes(into)
        size, data = await self._do(lambda: self._read(key, HEADER_BYTES + num_bytes))
        record = record_of(key, data[:HEADER_BYTES], size)
        if record.namespace != namespace or record.num_bytes != num_bytes:
            return None
        if await self._threads.run(lambda: _spread(data[HEADER_BYTES:], into)) != record.digest:
            raise Damaged(f"{key.hex()}: not the bytes that were written")
        return record

    async def _delete(self, key: bytes) -> None:
        async with self._sizes.alone(key):
            with suppress(FileNotFoundError):
                await self._do(lambda: obstore.delete_async(self._store, key.hex()))
            self._sizes.set(key, 0)

    async def _read(self, key: bytes, wanted: int) -> tuple[int, memoryview]:
        """The object's size, and all of it where it has the wanted one; else its header, out of the same answer: by the
        next one another object may lie there."""
        found = await obstore.get_async(self._store, key.hex())
        size = found.meta["size"]
        if size == wanted:
            return size, memoryview(await found.bytes_async())
        return size, memoryview(await anext(found.stream(HEADER_BYTES), b""))

    async def _whole(self, key: bytes, size: int) -> BlockRecord | None:
        """Its record, if it is whole as far as its header and its size say."""
        try:
            if size < HEADER_BYTES:
                raise Damaged(f"{key.hex()}: cut off")
            head: GetOptions = {"range": (0, HEADER_BYTES)}
            found = await self._do(lambda: obstore.get_async(self._store, key.hex(), options=head))
            header = memoryview(await self._do(found.bytes_async))
            return record_of(key, header, found.meta["size"])
        except FileNotFoundError:
            return None
        except Damaged as damage:
            await self._drop(key, damage)
            return None

    async def _drop(self, key: bytes, damage: Damaged) -> None:
        _log.warning("a block in S3 is damaged and dropped: %s", damage)
        await self._delete(key)

    async def _look_again(self, key: bytes) -> None:
        """Somebody else may have removed it."""
        async with self._sizes.alone(key):
            try:
                meta = await self._do(lambda: obstore.head_async(self._store, key.hex()))
            except FileNotFoundError:
                self._sizes.set(key, 0)
            else:
                self._sizes.set(key, meta["size"])


def _spread(data: memoryview, into: Parts) -> bytes:
    """The digest of what the pieces hold then. numpy copies without the interpreter's lock."""
    start = 0
    for part in into:
        np.frombuffer(part, np.uint8)[:] = np.frombuffer(data[start : start + part.nbytes], np.uint8)
        start += part.nbytes
    return digest_of(into)


def _meaning(error: Exception, options: S3Options) -> StoreError:
    text = " ".join(str(error).split())
    if _NO_BUCKET in text:
        return StoreUnavailable(f"{options}: there is no such bucket")
    kind = StoreFull if _FULL.search(text) else StoreUnavailable
    return kind(f"{options}: {text[:_MESSAGE_LEN]}")


async def _all(works: Iterable[Awaitable[T]]) -> list[T]:
    """What they return, all having ended; raises what the first of them raised."""
    found = await asyncio.gather(*works, return_exceptions=True)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return cast(list[T], found)
