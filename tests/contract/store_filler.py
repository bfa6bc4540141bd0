"""A process that fills the device under a store's directory and goes on serving, for the tests of full disks.

    python -m tests.contract.store_filler full|limited|read-only DIRECTORY

full: the file system of the directory has 4 MiB. limited: no file may grow beyond 300,000 bytes. read-only: what is
written goes to a file system that takes nothing, which this process may mount.
"""

import asyncio
import contextlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shared.runtime.errors import StoreError, StoreFull, StoreUnavailable
from shared.store.disk import DiskDriver
from tests.contract.store_drivers import get_bytes, key_of, listed, payload, put_bytes

NUM_BYTES = 600_000
SMALL, SMALL_DATA = key_of(100), payload(50_000, seed=100)


async def fill(directory: Path) -> None:
    """Blocks, several at once, until the device takes no more."""
    driver = await _with_a_block(directory)
    blocks = {key_of(k): payload(NUM_BYTES, seed=k) for k in range(12)}
    results = await asyncio.gather(*(put_bytes(driver, *block) for block in blocks.items()), return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    assert failed
    assert all(isinstance(result, StoreFull) for result in failed), failed
    there = set(await listed(driver)) - {SMALL}
    assert len(there) == len(results) - len(failed) > 0
    assert {key: await get_bytes(driver, key, NUM_BYTES) for key in there} == {key: blocks[key] for key in there}
    with contextlib.suppress(OSError), (directory.parent / "others").open("wb", buffering=0) as others:
        while others.write(bytes(4096)):
            pass
    await _goes_on(driver, directory, StoreFull, "No space left")
    await driver.close()
    again = DiskDriver(directory)
    await again.open()
    assert set(await listed(again)) == {SMALL, *there}
    gone = there.pop()
    await again.delete(gone)
    await put_bytes(again, gone, blocks[gone])
    assert await get_bytes(again, gone, NUM_BYTES) == blocks[gone]
    await again.close()


async def limit(directory: Path) -> None:
    driver = await _with_a_block(directory)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    await _goes_on(driver, directory, StoreFull, "too large")
    await put_bytes(driver, SMALL, SMALL_DATA)
    await driver.close()


async def forbid(directory: Path) -> None:
    driver = await _with_a_block(directory)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(directory / "incoming")], check=True)
    await _goes_on(driver, directory, StoreUnavailable, "Read-only")
    await driver.close()


async def _with_a_block(directory: Path) -> DiskDriver:
    driver = DiskDriver(directory)
    await driver.open()
    await put_bytes(driver, SMALL, SMALL_DATA)
    return driver


async def _goes_on(driver: DiskDriver, directory: Path, kind: type[StoreError], why: str) -> None:
    """A put is refused, leaves nothing, and the rest is as it was."""
    before = driver.usage()
    with pytest.raises(kind, match=why) as refused:
        await put_bytes(driver, key_of(50), payload(NUM_BYTES, seed=50))
    assert type(refused.value) is kind
    assert list((directory / "incoming").iterdir()) == []
    assert driver.usage() == before
    assert await get_bytes(driver, key_of(50), NUM_BYTES) is None
    assert await get_bytes(driver, SMALL, len(SMALL_DATA)) == SMALL_DATA


if __name__ == "__main__":
    asyncio.run({"full": fill, "limited": limit, "read-only": forbid}[sys.argv[1]](Path(sys.argv[2])))
    print("went on")
