"""Two processes with a pool of pages each, for links of others: as many pages, from as random places to as random ones,
as `benchmarks.transfer_ends` moves. Needs numpy and nothing else."""

import json
import mmap
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_SETTLE_S = 60.0


@dataclass(frozen=True)
class Pages:
    """So many pages of this size, of a pool of so many."""

    page_bytes: int
    num_pages: int
    pool_pages: int

    @classmethod
    def from_arguments(cls) -> "Pages":
        return cls(*(int(size) for size in sys.argv[1:4]))

    def chosen(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(self.pool_pages)[: self.num_pages]

    def new_pool(self, seed: int) -> np.ndarray:
        pool = np.frombuffer(mmap.mmap(-1, self.page_bytes * self.pool_pages), dtype=np.uint8)
        pool[:] = np.resize(np.random.default_rng(seed).integers(0, 256, (1 << 20) + 7, dtype=np.uint8), len(pool))
        return pool

    def check(self, pool: np.ndarray, seed: int) -> int:
        """Of the chosen pages in their order."""
        pages, found = pool.reshape(self.pool_pages, self.page_bytes), 0
        for page in self.chosen(seed).tolist():
            found = zlib.crc32(pages[page], found)
        return found


class Wire:
    """JSON lines to the other process."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._file = sock, sock.makefile("rw")

    def say(self, **message: Any) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def hear(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._file.readline() or "{}")
        return message


def apart(receive: Callable[[Wire], None]) -> Wire:
    """Runs `receive` in a process of its own, which ends with this one."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        try:
            receive(Wire(theirs))
        finally:
            os._exit(0)
    theirs.close()
    return Wire(ours)


def poll(done: Callable[[], bool]) -> None:
    """Awake: links that only move while they are asked need that."""
    deadline = time.perf_counter() + _SETTLE_S
    while not done():
        if time.perf_counter() > deadline:
            raise TimeoutError("the transfer does not end")
