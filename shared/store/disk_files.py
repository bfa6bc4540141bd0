"""The directory of the driver `disk`, and one file in it. All of this blocks; nothing here knows limits or usage.

    lock             held by the one process that uses the directory
    incoming/        files that are being written; what a crash leaves there is removed at the next start
    blocks/00 … ff/  KEY.block, by the first byte of the key: a header (record.py) and the payload, nothing else

A file gets its name in `blocks` by a rename once it is whole, so that there is never a part of one under a name.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from shared.runtime.errors import StoreUnavailable
from shared.store.driver import BlockRecord, Parts
from shared.store.keys import KEY_BYTES
from shared.store.parts import read_all, total_bytes, write_all
from shared.store.record import HEADER_BYTES, Malformed, pack_header, parse_header

FANS = tuple(f"{byte:02x}" for byte in range(256))
_SUFFIX = ".block"
_PRIVATE_DIRECTORY, _PRIVATE_FILE = 0o700, 0o600
"""Blocks are computed from what people wrote."""


class Damaged(Exception):
    """What lies under a block's name is not a whole block."""


@dataclass(slots=True)
class Scanned:
    """What a directory of `blocks` held. sizes: bytes of files by key. dropped: names of what was no whole block and
    has been removed. left: what is none of ours, or cannot be read, and has been left alone."""

    sizes: dict[bytes, int] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class BlockFiles:
    def __init__(self, directory: Path, fsync: bool) -> None:
        self.directory = directory
        self._fsync = fsync
        self._blocks, self._incoming = directory / "blocks", directory / "incoming"
        self._number = count()
        self._lock_fd = -1

    def open(self) -> int:
        """Takes the directory, makes what is missing in it, and removes what was never finished: how many files.
        Raises StoreUnavailable if another process uses it, and OSError; then it is not taken."""
        new = [path for path in (self.directory, *self.directory.parents) if not path.exists()]
        self.directory.mkdir(_PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        self._take()
        try:
            for path in (self._incoming, self._blocks, *(self._blocks / fan for fan in FANS)):
                path.mkdir(_PRIVATE_DIRECTORY, exist_ok=True)
            unfinished = list(self._incoming.iterdir())
            for path in unfinished:
                path.unlink()
            for path in (self._blocks, self.directory, *(path.parent for path in new)):
                self._sync(path)
        except BaseException:
            self.close()
            raise
        return len(unfinished)

    def close(self) -> None:
        """Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def scan(self, fan: str) -> Scanned:
        """Looks at every header in blocks/FAN. Raises OSError if the directory itself cannot be read."""
        scanned = Scanned()
        for path in sorted((self._blocks / fan).iterdir()):
            key = _key_of(path)
            if key is None or fan != path.name[:2]:
                scanned.left.append(path.name)
                continue
            try:
                with self.opened(key) as fd:
                    scanned.sizes[key] = HEADER_BYTES + header_of(fd, key).num_bytes
            except Damaged:
                path.unlink()
                scanned.dropped.append(path.name)
            except OSError:
                scanned.left.append(path.name)
        return scanned

    def write(self, record: BlockRecord, parts: Parts) -> Path:
        """A whole file in `incoming`, on the device if so set. After an error (OSError) none is left."""
        path = self._incoming / f"{record.key.hex()}-{next(self._number)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE_FILE)
        try:
            try:
                write_all(fd, (pack_header(record), *parts))
                if self._fsync:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
        except BaseException:
            path.unlink()
            raise
        return path

    def publish(self, written: Path, key: bytes) -> None:
        """Gives the file its name, in place of one that has it. After an error (OSError) it is gone."""
        try:
            os.rename(written, self._path(key))
        except BaseException:
            written.unlink()
            raise

    def sync_name(self, key: bytes) -> None:
        self._sync(self._path(key).parent)

    @contextmanager
    def opened(self, key: bytes) -> Iterator[int]:
        """A descriptor of the file that has this name now. Raises OSError."""
        fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def remove(self, key: bytes) -> None:
        """Idempotent. Raises OSError."""
        self._path(key).unlink(missing_ok=True)

    def is_still(self, key: bytes, fd: int) -> bool:
        """Whether the file that has this name is the one that was opened as `fd`. Raises OSError."""
        return self.exists(key) and os.path.samestat(os.fstat(fd), self._path(key).stat())

    def exists(self, key: bytes) -> bool:
        return self._path(key).exists()

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._blocks / name[:2] / f"{name}{_SUFFIX}"

    def _take(self) -> None:
        path = self.directory / "lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            whose = f"process {holder}" if holder else "another process"
            text = f"{self.directory} is in use by {whose}: each kvstore needs a directory of its own"
            raise StoreUnavailable(text) from None
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd
        os.pwrite(fd, f"{os.getpid():<19}\n".encode(), 0)  # of one length, so that a full device takes it

    def _sync(self, directory: Path) -> None:
        if not self._fsync:
            return
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def header_of(fd: int, key: bytes) -> BlockRecord:
    """What a file says of itself, not having read its payload. Raises Damaged and OSError."""
    try:
        record = parse_header(os.pread(fd, HEADER_BYTES, 0))
    except Malformed as error:
        raise Damaged(f"its header: {error}") from error
    if record.key != key or os.fstat(fd).st_size != HEADER_BYTES + record.num_bytes:
        raise Damaged("its header speaks of another file")
    return record


def read_block(fd: int, key: bytes, namespace: str, into: Parts) -> BlockRecord | None:
    """Fills the pieces; None where the block is of another namespace or size. Raises Damaged and OSError."""
    record = header_of(fd, key)
    if record.namespace != namespace or record.num_bytes != total_bytes(into):
        return None
    if read_all(fd, into, HEADER_BYTES) != record.digest:
        raise Damaged("its payload does not fit its digest")
    return record


def _key_of(path: Path) -> bytes | None:
    try:
        key = bytes.fromhex(path.name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and path.name == f"{key.hex()}{_SUFFIX}" else None
