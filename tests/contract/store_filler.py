"""A process that fills the device under a store's directory and goes on serving, for the tests of full disks.

    python -m tests.contract.store_filler full|limited|read-only DIRECTORY

full: the file system of the directory has 4 MiB. limited: no file may grow beyond 300,000 bytes. read-only: what is
written goes to a file system that takes nothing, which this process may mount.
"""

import asyncio
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from shared.runtime.errors import StoreFull, StoreUnavailable
from shared.store.disk import DiskDriver
from tests.contract.store_drivers import get_bytes, key_of, listed, payload, put_bytes

NUM_BYTES = 600_000


async def main(what: str, directory: Path) -> None:
    driver = DiskDriver(directory)
    await driver.open()
    small = payload(50_000, seed=7)
    await put_bytes(driver, key_of(100), small)
    if what == "full":
        await _until_full(driver)
    elif what == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        with pytest.raises(StoreFull):
            await put_bytes(driver, key_of(0), payload(NUM_BYTES, seed=0))
    else:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(directory / "incoming")], check=True)
        with pytest.raises(StoreUnavailable, match="Read-only"):
            await put_bytes(driver, key_of(0), small)
    assert await get_bytes(driver, key_of(0), NUM_BYTES) is None
    assert await get_bytes(driver, key_of(100), len(small)) == small
    assert list((directory / "incoming").iterdir()) == [], "a put that failed left a file"
    if what != "read-only":
        await put_bytes(driver, key_of(100), small)
        assert await get_bytes(driver, key_of(100), len(small)) == small
    await driver.close()


async def _until_full(driver: DiskDriver) -> None:
    """Puts, several at once, until nothing goes; and again once there is room."""
    blocks = {key_of(k): payload(NUM_BYTES, seed=k) for k in range(1, 13)}
    results = await asyncio.gather(*(put_bytes(driver, *block) for block in blocks.items()), return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    assert failed
    assert all(isinstance(result, StoreFull) for result in failed), failed
    there = set(await listed(driver)) - {key_of(100)}
    assert len(there) == len(results) - len(failed) > 0
    assert {key: await get_bytes(driver, key, NUM_BYTES) for key in there} == {key: blocks[key] for key in there}
    with pytest.raises(StoreFull):
        await put_bytes(driver, key_of(20), payload(NUM_BYTES, seed=20))
    gone = next(iter(there))
    await driver.delete(gone)
    await put_bytes(driver, gone, blocks[gone])
    assert await get_bytes(driver, gone, NUM_BYTES) == blocks[gone]
    await driver.delete(gone)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
    print("went on")
