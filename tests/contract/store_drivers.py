"""The store's drivers as the contract tests meet them. A driver joins all of these tests by one line in BEDS."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from shared.store.driver import BlockDriver, BlockRecord, Parts
from shared.store.memory import MemoryDriver
from shared.store.open import make_driver
from shared.store.options import DriverOptions

NAMESPACE = "model-a:layout-1"


@dataclass(frozen=True)
class Bed:
    """Where a driver keeps its blocks in one test: every driver made from `options` sees the same ones, and no other
    test does. persistent: they outlive the driver. limited: it keeps to limit_bytes. spoil: changes a byte of a block's
    payload behind the driver's back."""

    name: str
    options: DriverOptions
    spoil: Callable[[BlockDriver, bytes], Awaitable[None]]
    persistent: bool = True
    limited: bool = True

    def driver(self, limit_bytes: int | None = None) -> BlockDriver:
        """Not open yet."""
        return make_driver(self.name, replace(self.options, limit_bytes=limit_bytes))


@asynccontextmanager
async def memory_bed(directory: Path) -> AsyncIterator[Bed]:
    async def spoil(driver: BlockDriver, key: bytes) -> None:
        assert isinstance(driver, MemoryDriver)
        driver._blocks[key][1][0] ^= 1

    yield Bed("memory", DriverOptions(), spoil, persistent=False)


def disk_bed(fsync: bool) -> Callable[[Path], AbstractAsyncContextManager[Bed]]:
    @asynccontextmanager
    async def bed(directory: Path) -> AsyncIterator[Bed]:
        async def spoil(driver: BlockDriver, key: bytes) -> None:
            with block_file(directory / "store", key).open("r+b") as file:
                file.seek(-1, 2)
                byte = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([byte ^ 1]))

        yield Bed("disk", DriverOptions(where=str(directory / "store"), fsync=fsync), spoil)

    return bed


BEDS: dict[str, Callable[[Path], AbstractAsyncContextManager[Bed]]] = {
    "memory": memory_bed,
    "disk": disk_bed(fsync=True),
    "disk-unsynced": disk_bed(fsync=False),
}
"""What makes a bed, by the name that it has in the tests' names. The directory is empty and the test's own."""


def block_file(directory: Path, key: bytes) -> Path:
    return directory / "blocks" / key.hex()[:2] / f"{key.hex()}.block"


def payload(num_bytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def key_of(number: int) -> bytes:
    return xxhash.xxh3_128_digest(number.to_bytes(8, "little"))


def record_of(key: bytes, data: bytes, namespace: str = NAMESPACE, **others: object) -> BlockRecord:
    plain = BlockRecord(key, len(data), xxhash.xxh3_128_digest(data), namespace, "tenant", 64, False, 1234.5)
    return replace(plain, **others)  # type: ignore[arg-type]


def cut(data: bytes | bytearray, sizes: Sequence[int] = ()) -> Parts:
    """Pieces of these sizes, and one of what is left."""
    view, parts = memoryview(data), []
    for size in sizes:
        parts.append(view[:size])
        view = view[size:]
    return (*parts, view)


async def put_bytes(driver: BlockDriver, key: bytes, data: bytes, namespace: str = NAMESPACE) -> BlockRecord:
    record = record_of(key, data, namespace)
    await driver.put(record, cut(data, (len(data) // 3,)))
    return record


async def get_bytes(driver: BlockDriver, key: bytes, num_bytes: int, namespace: str = NAMESPACE) -> bytes | None:
    """What is there, or None. What a driver returns is held against its own record."""
    room = bytearray(num_bytes)
    record = await driver.get(key, namespace, cut(room, (num_bytes // 2,)))
    if record is None:
        return None
    assert (record.key, record.namespace, record.num_bytes) == (key, namespace, num_bytes)
    assert xxhash.xxh3_128_digest(room) == record.digest
    return bytes(room)


async def listed(driver: BlockDriver) -> dict[bytes, BlockRecord]:
    found = [record async for record in driver.records()]
    assert len({record.key for record in found}) == len(found)
    return {record.key: record for record in found}
