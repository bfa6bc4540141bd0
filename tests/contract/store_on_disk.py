"""A directory of the driver `disk` with two blocks in it, for tests of what happens to its files."""

from pathlib import Path

from shared.store.disk import DiskDriver
from shared.store.record import HEADER_BYTES
from tests.contract.store_drivers import block_file, key_of, payload, put_bytes

KEY, OTHER = key_of(1), key_of(2)
DATA = payload(10_000, seed=1)
SIZE = HEADER_BYTES + len(DATA)
"""Of each of their files."""


async def opened(directory: Path, limit_bytes: int | None = None) -> DiskDriver:
    driver = DiskDriver(directory, limit_bytes, fsync=False)
    await driver.open()
    return driver


async def filled(directory: Path) -> Path:
    """Two blocks; the path of KEY's."""
    driver = await opened(directory)
    await put_bytes(driver, KEY, DATA)
    await put_bytes(driver, OTHER, DATA)
    await driver.close()
    return block_file(directory, KEY)
