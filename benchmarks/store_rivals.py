"""What the store's drivers are held against: the same bytes by the plainest way there is, with no header, no digest, no
name and no promise."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol, Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks, each scattered in a pool as a model's layers are. blocks, room: [num_blocks, num_parts, part_bytes]: what
    is put, and where it is read into."""

    blocks: np.ndarray
    room: np.ndarray

    @classmethod
    def of(cls, num_blocks: int, num_parts: int, part_bytes: int) -> Self:
        """All pages are touched: the first use of memory is slow and nobody's fault."""
        layers = np.random.default_rng(1).integers(0, 256, (num_parts, num_blocks, part_bytes), dtype=np.uint8)
        return cls(layers.transpose(1, 0, 2), np.ones_like(layers).transpose(1, 0, 2))

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self.blocks.shape[1] * self.blocks.shape[2])

    def parts(self, number: int) -> list[memoryview]:
        return [part.data for part in self.blocks[number]]

    def places(self, number: int) -> list[memoryview]:
        return [part.data for part in self.room[number]]


class Rival(Protocol):
    """at_once: blocks under way at a time."""

    def put_s(self, at_once: int) -> float: ...

    def get_s(self, at_once: int) -> float: ...

    def forget(self) -> None:
        """What was put is no longer in the page cache."""

    def close(self) -> None: ...


class RawFile:
    """One file, block behind block: pwritev and, if synced, fdatasync after each; preadv."""

    def __init__(self, load: Load, path: Path, synced: bool) -> None:
        self._load, self._synced = load, synced
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT)

    def put_s(self, at_once: int) -> float:
        os.ftruncate(self._fd, 0)
        return _timed(self._put, range(self._load.num_blocks), at_once)

    def get_s(self, at_once: int) -> float:
        return _timed(self._get, range(self._load.num_blocks), at_once)

    def forget(self) -> None:
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)

    def _put(self, number: int) -> None:
        size = self._load.block_bytes
        if os.pwritev(self._fd, self._load.parts(number), number * size) != size:
            raise OSError("the raw write was short")
        if self._synced:
            os.fdatasync(self._fd)

    def _get(self, number: int) -> None:
        size = self._load.block_bytes
        if os.preadv(self._fd, self._load.places(number), number * size) != size:
            raise OSError("the raw read was short")


class RawMemory:
    """A copy, part by part, into memory that is there already."""

    def __init__(self, load: Load) -> None:
        self._load, self._held = load, np.ones_like(load.blocks)

    def put_s(self, at_once: int) -> float:
        return _timed(lambda k: _copy(self._load.blocks[k], self._held[k]), range(self._load.num_blocks), at_once)

    def get_s(self, at_once: int) -> float:
        return _timed(lambda k: _copy(self._held[k], self._load.room[k]), range(self._load.num_blocks), at_once)

    def forget(self) -> None:
        pass

    def close(self) -> None:
        pass


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    for part, place in zip(source, target, strict=True):
        place[:] = part


def _timed(work: Callable[[int], None], numbers: Iterable[int], at_once: int) -> float:
    with ThreadPoolExecutor(at_once) as threads:
        begin = perf_counter()
        list(threads.map(work, numbers))
        return perf_counter() - begin
