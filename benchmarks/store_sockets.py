"""What the drivers that talk to a server are held against: the same pieces over a bare socket to another process, and a
client library that is given joined bytes and gives joined bytes.

`python -m benchmarks.store_sockets BYTES` is the bare socket's other process: it says its port, and then takes or gives
blocks of so many bytes.
"""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np
import xxhash

from benchmarks.rivals import REPO, NotThere
from benchmarks.store_rivals import Load, timed
from benchmarks.store_servers import NO_S3, NO_VALKEY, S3_KEYS, VALKEY, WEED, Valkey, Weed
from shared.store.options import DriverOptions
from shared.store.parts import after

_PUT, _GET, _DONE = b"P", b"G", b"."


@contextmanager
def serve_valkey(directory: Path) -> Iterator[DriverOptions]:
    """Raises NotThere."""
    if VALKEY is None:
        raise NotThere(NO_VALKEY)
    server = Valkey(directory / "valkey")
    server.start()
    try:
        yield DriverOptions(server.url())
    finally:
        server.kill()


@contextmanager
def serve_weed(directory: Path) -> Iterator[DriverOptions]:
    """Raises NotThere."""
    if WEED is None or find_spec("obstore") is None:
        raise NotThere(NO_S3)
    os.environ.update(S3_KEYS)
    server = Weed(directory / "weed")
    server.start()
    try:
        yield DriverOptions(server.url("bench"))
    finally:
        server.kill()


class RawSocket:
    """Implements `Rival`: sendmsg and recvmsg_into, a connection for each block that is under way."""

    def __init__(self, load: Load) -> None:
        self._load = load
        words = [sys.executable, "-m", "benchmarks.store_sockets", str(load.block_bytes)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, cwd=REPO, stdin=pipe, stdout=pipe)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())
        self._idle: SimpleQueue[socket.socket] = SimpleQueue()
        self._all: list[socket.socket] = []

    def put_s(self, at_once: int) -> float:
        self._open(at_once)
        return timed(self._put, range(self._load.num_blocks), at_once)

    def get_s(self, at_once: int) -> float:
        self._open(at_once)
        return timed(self._get, range(self._load.num_blocks), at_once)

    def forget(self) -> None:
        pass

    def close(self) -> None:
        for sock in self._all:
            sock.close()
        self._process.communicate()

    def _open(self, count: int) -> None:
        while len(self._all) < count:
            sock = socket.create_connection(("127.0.0.1", self._port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._all.append(sock)
            self._idle.put(sock)

    def _put(self, number: int) -> None:
        sock = self._idle.get()
        left = [memoryview(_PUT), *(part.cast("B") for part in self._load.parts(number))]
        while left:
            left = after(left, sock.sendmsg(left))
        if sock.recv(1) != _DONE:
            raise RuntimeError("the other end of the bare socket is gone")
        self._idle.put(sock)

    def _get(self, number: int) -> None:
        sock = self._idle.get()
        sock.sendall(_GET)
        left = [part.cast("B") for part in self._load.places(number)]
        while left:
            moved = sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            if not moved:
                raise RuntimeError("the other end of the bare socket is gone")
            left = after(left, moved)
        self._idle.put(sock)


class RedisClient:
    """Implements `Rival`: redis-py's asyncio client with hiredis, on the same server, in a loop of its own."""

    def __init__(self, load: Load, url: str) -> None:
        try:
            import hiredis  # noqa: F401
            import redis.asyncio
        except ModuleNotFoundError as error:
            raise NotThere("pip install redis hiredis") from error
        self._load, self._url, self._redis = load, url, redis.asyncio

    def put_s(self, at_once: int) -> float:
        return self._run(self._put, at_once)

    def get_s(self, at_once: int) -> float:
        return self._run(self._get, at_once)

    def forget(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _run(self, work: Callable[[Any, int], Awaitable[None]], at_once: int) -> float:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._timed(work, at_once)).result()

    async def _timed(self, work: Callable[[Any, int], Awaitable[None]], at_once: int) -> float:
        async with self._redis.Redis.from_url(self._url) as client:
            await asyncio.gather(*(client.ping() for _ in range(at_once)))
            numbers = iter(range(self._load.num_blocks))

            async def worker() -> None:
                for number in numbers:
                    await work(client, number)

            began = perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(worker())
            return perf_counter() - began

    async def _put(self, client: Any, number: int) -> None:
        await client.set(b"client:%d" % number, b"".join(self._load.parts(number)))

    async def _get(self, client: Any, number: int) -> None:
        data = np.frombuffer(await client.get(b"client:%d" % number), np.uint8)
        room = self._load.room[number]
        room[:] = data.reshape(room.shape)
        hasher = xxhash.xxh3_128()
        for part in room:
            hasher.update(part.data)
        hasher.digest()


def _serve(block_bytes: int) -> None:
    """Until its standard input ends."""
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            threading.Thread(target=_answer, args=(server.accept()[0], block_bytes), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


def _answer(sock: socket.socket, block_bytes: int) -> None:
    room = memoryview(bytearray(block_bytes))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while word := sock.recv(1):
        if word == _GET:
            sock.sendall(room)
            continue
        left = room
        while left and (moved := sock.recv_into(left, 0, socket.MSG_WAITALL)):
            left = left[moved:]
        sock.sendall(_DONE)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
