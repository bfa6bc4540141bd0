"""Blocks as files, one each: the store's default. What it promises about crashes follows from how a file comes to its
name (disk_files.py); what it promises about its bytes, from the digest that every read checks."""

import errno
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from shared.runtime.errors import StoreFull, StoreUnavailable
from shared.store.disk_files import FANS, BlockFiles, Damaged, header_of, read_block
from shared.store.driver import BlockRecord, Parts
from shared.store.options import DriverOptions
from shared.store.parts import require_sizes
from shared.store.record import HEADER_BYTES
from shared.store.threads import StoreThreads

T = TypeVar("T")
log = logging.getLogger(__name__)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUM_READERS, _NUM_WRITERS, _NUM_SCANNERS = 4, 4, 8
_HEADERS_AT_ONCE = 256
_SURVIVES = {
    True: "A block that was put survives the kvstore's end, the system's and a loss of power, as far as the device "
    "keeps what it reported as written; it does not survive the loss of the disk.",
    False: "A block that was put survives the kvstore's end; of the last half minute before the system's end or a loss "
    "of power any may be missing, and none comes back changed.",
}


class DiskDriver:
    """Reads have threads of their own: a recovery does not wait behind what is being put on the device.
    dropped: files that were no whole blocks and have been removed, by when that was seen."""

    name: ClassVar[str] = "disk"

    def __init__(self, directory: Path, limit_bytes: int | None = None, fsync: bool = True) -> None:
        self.durability = _SURVIVES[fsync]
        self.dropped: Counter[str] = Counter()
        self._limit_bytes = limit_bytes
        self._fsync = fsync
        self._files = BlockFiles(directory, fsync)
        self._reads = StoreThreads(_NUM_READERS, "store-read")
        self._writes = StoreThreads(_NUM_WRITERS, "store-write")
        self._lock = threading.Lock()
        """Held while a name comes or goes, so that the sizes below are those of the files with names."""
        self._sizes: dict[bytes, int] = {}
        self._used_bytes = 0
        self._coming_bytes = 0

    @classmethod
    def from_options(cls, options: DriverOptions) -> Self:
        if not options.where:
            raise ValueError("the store driver disk needs a directory")
        return cls(Path(options.where), options.limit_bytes, options.fsync)

    async def open(self) -> None:
        await self._writes.run(lambda: _told(self._open))

    async def records(self) -> AsyncIterator[BlockRecord]:
        keys = list(self._sizes)
        for start in range(0, len(keys), _HEADERS_AT_ONCE):
            some = keys[start : start + _HEADERS_AT_ONCE]
            for record in await self._reads.run(partial(_told, partial(self._headers, some))):
                yield record

    async def put(self, record: BlockRecord, parts: Parts) -> None:
        require_sizes(record, parts)
        await self._writes.run(lambda: _told(lambda: self._put(record, parts)))

    async def get(self, key: bytes, namespace: str, into: Parts) -> BlockRecord | None:
        if key not in self._sizes:
            return None
        return await self._reads.run(lambda: _told(lambda: self._get(key, namespace, into)))

    async def delete(self, key: bytes) -> None:
        if key in self._sizes:
            await self._writes.run(lambda: _told(lambda: self._remove(key)))

    def usage(self) -> tuple[int, int | None]:
        return self._used_bytes, self._limit_bytes

    async def close(self) -> None:
        await self._reads.close()
        await self._writes.close()
        self._files.close()

    def _open(self) -> None:
        unfinished = self._files.open()
        with ThreadPoolExecutor(_NUM_SCANNERS, "store-scan") as threads:
            found = list(threads.map(self._files.scan, FANS))
        for scanned in found:
            self._sizes.update(scanned.sizes)
        self._used_bytes = sum(self._sizes.values())
        dropped = [name for scanned in found for name in scanned.dropped]
        left = [name for scanned in found for name in scanned.left]
        self.dropped.update(unfinished=unfinished, at_start=len(dropped))
        where = self._files.directory
        log.info("%s: %d blocks of %d bytes", where, len(self._sizes), self._used_bytes)
        if unfinished or dropped:
            text = "%s: removed %d files that were never finished and %d that are no whole blocks%s"
            log.warning(text, where, unfinished, len(dropped), f", such as {dropped[0]}" if dropped else "")
        if left:
            log.warning("%s: left alone %d files, such as %s: not ours, or unreadable", where, len(left), left[0])

    def _put(self, record: BlockRecord, parts: Parts) -> None:
        size = HEADER_BYTES + record.num_bytes
        self._reserve(record.key, size)
        written = None
        try:
            written = self._files.write(record, parts)
        finally:
            with self._lock:
                self._coming_bytes -= size
                if written is not None:
                    self._files.publish(written, record.key)
                    self._count(record.key, size)
        if self._fsync:
            self._files.sync_name(record.key)

    def _reserve(self, key: bytes, size: int) -> None:
        """Where the file that will be replaced and the new one do not both fit, the old one goes first: the limit is of
        what lies on the device at any moment."""
        with self._lock:
            if self._limit_bytes is not None:
                over = self._used_bytes + self._coming_bytes + size - self._limit_bytes
                if over > self._sizes.get(key, 0):
                    raise StoreFull(f"blocks take {self._used_bytes} of {self._limit_bytes} bytes")
                if over > 0:
                    self._files.remove(key)
                    self._count(key, 0)
            self._coming_bytes += size

    def _count(self, key: bytes, size: int) -> None:
        self._used_bytes += size - self._sizes.pop(key, 0)
        if size:
            self._sizes[key] = size

    def _get(self, key: bytes, namespace: str, into: Parts) -> BlockRecord | None:
        return self._look(key, lambda fd: read_block(fd, key, namespace, into))

    def _headers(self, keys: list[bytes]) -> list[BlockRecord]:
        found = [self._look(key, partial(header_of, key=key)) for key in keys]
        return [record for record in found if record is not None]

    def _look(self, key: bytes, look: Callable[[int], BlockRecord | None]) -> BlockRecord | None:
        """None for a file that is not there, and for a damaged one, which is dropped."""
        try:
            with self._files.opened(key) as fd:
                try:
                    return look(fd)
                except Damaged as damage:
                    self._drop(key, fd, damage)
        except FileNotFoundError:
            self._forget(key)
        return None

    def _remove(self, key: bytes) -> None:
        with self._lock:
            self._files.remove(key)
            self._count(key, 0)

    def _forget(self, key: bytes) -> None:
        """Somebody else removed the file."""
        with self._lock:
            if not self._files.exists(key):
                self._count(key, 0)

    def _drop(self, key: bytes, fd: int, damage: Damaged) -> None:
        """Unless another file has taken that name meanwhile. The open descriptor keeps its inode from being reused."""
        with self._lock:
            if not self._files.is_still(key, fd):
                return
            self._files.remove(key)
            self._count(key, 0)
            self.dropped["at_read"] += 1
        log.warning("%s: dropped block %s: %s", self._files.directory, key.hex(), damage)


def _told(work: Callable[[], T]) -> T:
    """What the system says in the words of the store."""
    try:
        return work()
    except OSError as error:
        kind = StoreFull if error.errno in _NO_ROOM else StoreUnavailable
        raise kind(f"the store's disk: {error}") from error
