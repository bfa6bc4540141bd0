"""A block's bytes in pieces: how many they are, what they hash to, and moving them to and from a file without a copy
that joins them."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence

import xxhash

from shared.store.driver import BlockRecord, Parts

_MOST_PIECES = os.sysconf("SC_IOV_MAX")
_BATCH_BYTES = 1 << 20
"""Read and hashed at a time: bytes that are still in a core's cache are hashed several times as fast."""
Piece = bytes | bytearray | memoryview
_Call = Callable[[int, list[memoryview], int], int]


def total_bytes(parts: Parts) -> int:
    return sum(part.nbytes for part in parts)


def digest_of(parts: Parts) -> bytes:
    """xxh3-128 over all of them as if they were one."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def require_sizes(record: BlockRecord, parts: Parts) -> None:
    """Raises ValueError where the pieces are not of the record's size: the caller's mistake."""
    if (given := total_bytes(parts)) != record.num_bytes:
        raise ValueError(f"the pieces have {given} bytes, and the record says {record.num_bytes}")


def write_all(fd: int, pieces: Sequence[Piece]) -> None:
    """From the file's beginning. Raises OSError."""
    offset = 0
    for batch in _batches(pieces):
        wanted = sum(piece.nbytes for piece in batch)
        if _move(os.pwritev, fd, batch, offset) != wanted:
            raise OSError(errno.EIO, "the device took no bytes and named no error")
        offset += wanted


def read_all(fd: int, parts: Parts, offset: int) -> bytes | None:
    """The digest of what the pieces hold once they are full; None where the file ends before. Raises OSError."""
    hasher = xxhash.xxh3_128()
    for batch in _batches(parts):
        wanted = sum(piece.nbytes for piece in batch)
        if _move(os.preadv, fd, batch, offset) != wanted:
            return None
        for piece in batch:
            hasher.update(piece)
        offset += wanted
    return hasher.digest()


def _batches(pieces: Sequence[Piece]) -> Iterator[list[memoryview]]:
    """Flat pieces of what one call may take."""
    batch: list[memoryview] = []
    room = _BATCH_BYTES
    for piece in pieces:
        left = memoryview(piece)
        if not left.nbytes:
            continue
        left = left.cast("B")
        while left.nbytes:
            batch.append(left[:room])
            room -= batch[-1].nbytes
            left = left[batch[-1].nbytes :]
            if not room or len(batch) == _MOST_PIECES:
                yield batch
                batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _move(call: _Call, fd: int, batch: list[memoryview], offset: int) -> int:
    """Bytes moved: all of them unless a call moves none."""
    done, left = 0, batch
    while left and (moved := call(fd, left, offset + done)):
        done += moved
        left = _after(left, moved)
    return done


def _after(pieces: list[memoryview], moved: int) -> list[memoryview]:
    for k, piece in enumerate(pieces):
        if moved < piece.nbytes:
            return [piece[moved:], *pieces[k + 1 :]]
        moved -= piece.nbytes
    return []
