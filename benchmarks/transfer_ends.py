"""Two workers' ends for `bench-transfer`: pools of their own, real sidecars, and what the bare machine does with the
same pages: one contiguous memcpy, and one socket with sendmsg and recvmsg_into.

`python -m benchmarks.transfer_ends` is the bare socket's other process: it says its port, and then answers one byte
for each filling of its pages.
"""

import asyncio
import itertools
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.link import Piece, TicketKey
from shared.transfer.pool import create_pool
from shared.transfer.sidecar_link import SidecarLink
from shared.transfer.sidecar_options import SidecarOptions

REPO = Path(__file__).parents[1]
_ROWS = 16
_COMPILE_S = 120.0
_IOVECS = 1024
_DONE = b"."
_secret = b"benchmark-secret"
_rooms = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Work:
    """So many pages of this size, from random ones of a pool to random ones of another."""

    page_bytes: int
    num_pages: int
    pool_pages: int

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    @property
    def layout(self) -> PoolLayout:
        page = StateComponent("pages", IndexKind.PAGE, _ROWS, (), (self.page_bytes // _ROWS,), "uint8", (0,))
        return PoolLayout((page,), num_pages=self.pool_pages, num_slots=1)

    def pages(self, seed: int) -> tuple[int, ...]:
        chosen = np.random.default_rng(seed).permutation(self.pool_pages)[: self.num_pages]
        return tuple(chosen.tolist())


@dataclass(slots=True)
class End:
    """A worker as far as links know it."""

    fd: int
    pool: np.ndarray
    link: SidecarLink

    @classmethod
    async def start(
        cls,
        work: Work,
        name: str,
        transfer: str,
        directory: Path,
        arguments: tuple[str, ...] = (),
        tcp_host: str | None = None,
    ) -> Self:
        """arguments: further flags of the sidecar."""
        fd = create_pool(work.layout)
        pool = np.frombuffer(mmap.mmap(fd, work.layout.total_bytes), dtype=np.uint8)
        pool[:] = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8), len(pool))
        options = SidecarOptions(name, directory, transfer=transfer, tcp_host=tcp_host, arguments=arguments)
        link = await SidecarLink.start(options, fd, work.layout)
        async with asyncio.timeout(_COMPILE_S):
            while not (await link.counters())["compiled"]:  # noqa: ASYNC110 - a sidecar tells nobody
                await asyncio.sleep(0.05)
        return cls(fd, pool, link)

    async def close(self) -> None:
        await self.link.close()
        os.close(self.fd)


@dataclass(slots=True)
class Ends:
    """`async with`: a sender and a receiver over one way. flags: of both sidecars."""

    work: Work
    transfer: str
    directory: Path
    sender: End
    receiver: End

    @classmethod
    async def start(cls, work: Work, transfer: str, directory: Path, arguments: tuple[str, ...] = ()) -> Self:
        sender = await End.start(work, "sender", transfer, directory, arguments)
        receiver = await End.start(work, "receiver", transfer, directory, arguments)
        return cls(work, transfer, directory, sender, receiver)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.sender.close()
        await self.receiver.close()

    async def warm_up(self) -> None:
        """Moves every page of the pools once: those that a sidecar sees for the first time cost more."""
        for first in range(0, self.work.pool_pages, self.work.num_pages):
            pages = tuple(range(first, first + self.work.num_pages))
            await self._send_s(pages, pages)

    async def send_s(self, seed: int) -> float:
        """From asking the own sidecar until the receiver's has confirmed that all of it landed. The ticket is opened
        before and closed after."""
        return await self._send_s(self.work.pages(seed), self.work.pages(seed + 1))

    async def _send_s(self, source: tuple[int, ...], target: tuple[int, ...]) -> float:
        key = TicketKey(next(_rooms), 1)
        await self.receiver.link.open(key, _secret, (target,), lambda _key: None)
        address, pieces = self.receiver.link.address, (Piece(0, 0, source, _ROWS),)
        began = time.perf_counter()
        await self.sender.link.send(key, _secret, address, pieces)
        took_s = time.perf_counter() - began
        if self.sender.link.actual_backend(key) != self.transfer:
            raise RuntimeError(f"{self.sender.link.actual_backend(key)} moved the bytes, not {self.transfer}")
        got, sent = await asyncio.gather(self.receiver.link.received(key), self.sender.link.sent(key))
        if got != sent or got[0].num_bytes != self.work.num_bytes:
            raise RuntimeError("what landed is not what was sent")
        await self.receiver.link.fence(key)
        await self.sender.link.forget(key)
        return took_s

    def memcpy_s(self) -> float:
        """As many bytes in one piece, by this thread, between the same pools."""
        size = self.work.num_bytes
        began = time.perf_counter()
        np.copyto(self.receiver.pool[:size], self.sender.pool[:size])
        return time.perf_counter() - began


class BareSocket:
    """`with`: a socket to another process that fills scattered pages of its own memory, and nothing else."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None
        self._pool = np.frombuffer(mmap.mmap(-1, work.page_bytes * work.pool_pages), dtype=np.uint8)
        self._pool[:] = 7

    def __enter__(self) -> Self:
        sizes = [str(size) for size in astuple(self._work)]
        argv = [sys.executable, "-m", "benchmarks.transfer_ends", *sizes]
        self._process = subprocess.Popen(argv, cwd=REPO, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self._socket = socket.create_connection(("127.0.0.1", port), 10)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.wait(10)
        self._process.stdout.close()

    def send_s(self, seed: int) -> float:
        views = _views(self._pool, self._work, seed)
        began = time.perf_counter()
        self._socket.sendall(struct.pack("!Q", seed + 1))
        _all(views, self._socket.sendmsg)
        if self._socket.recv(1) != _DONE:
            raise RuntimeError("the other end of the bare socket is gone")
        return time.perf_counter() - began


def _views(pool: np.ndarray, work: Work, seed: int) -> list[memoryview]:
    data, size = memoryview(pool), work.page_bytes
    return [data[page * size : (page + 1) * size] for page in work.pages(seed)]


def _all(views: list[memoryview], move: Callable[[list[memoryview]], int]) -> None:
    at = 0
    while at < len(views):
        moved = move(views[at : at + _IOVECS])
        if not moved:
            raise RuntimeError("the bare socket ended early")
        while at < len(views) and moved >= len(views[at]):
            moved -= len(views[at])
            at += 1
        if moved:
            views[at] = views[at][moved:]


def _receive(work: Work) -> None:
    pool = np.frombuffer(mmap.mmap(-1, work.page_bytes * work.pool_pages), dtype=np.uint8)
    pool[:] = 1
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := connection.recv(8, socket.MSG_WAITALL):
            views = _views(pool, work, struct.unpack("!Q", head)[0])
            _all(views, lambda some: connection.recvmsg_into(some, 0, socket.MSG_WAITALL)[0])
            connection.sendall(_DONE)


if __name__ == "__main__":
    _receive(Work(*(int(size) for size in sys.argv[1:])))
