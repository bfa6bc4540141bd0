"""Files of the driver `disk` that are not what was written: none of them is ever served."""

import asyncio
import os
from pathlib import Path

import pytest

from shared.store import disk_files, record
from shared.store.driver import Parts
from shared.store.parts import read_all
from shared.store.record import HEADER_BYTES, pack_header
from tests.contract.store_drivers import block_file, cut, get_bytes, listed, payload, put_bytes, record_of
from tests.contract.store_on_disk import DATA, KEY, OTHER, SIZE, filled, opened


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "a" / "store"


HEADER_REGIONS = {
    "magic": 0,
    "version": 8,
    "flags": 10,
    "namespace_length": 12,
    "tenant_length": 14,
    "num_bytes": 16,
    "tokens": 24,
    "written": 32,
    "key": 40,
    "digest": 56,
    "namespace": 73,
    "padding": 2000,
    "checksum": HEADER_BYTES - 3,
}


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("region", HEADER_REGIONS)
async def test_one_bit_of_a_header_and_the_block_is_dropped(directory: Path, region: str, bit: int) -> None:
    path = await filled(directory)
    spoiled = bytearray(path.read_bytes())
    spoiled[HEADER_REGIONS[region]] ^= 1 << bit
    path.write_bytes(spoiled)
    driver = await opened(directory)
    assert set(await listed(driver)) == {OTHER}
    assert driver.usage()[0] == SIZE
    assert driver.dropped["at_start"] == 1
    assert not path.exists()
    await driver.close()


@pytest.mark.parametrize("offset", [HEADER_BYTES, HEADER_BYTES + 5000, SIZE - 1])
async def test_one_bit_of_a_payload_and_the_block_is_dropped_when_read(directory: Path, offset: int) -> None:
    path = await filled(directory)
    spoiled = bytearray(path.read_bytes())
    spoiled[offset] ^= 0x10
    path.write_bytes(spoiled)
    driver = await opened(directory)
    assert await get_bytes(driver, KEY, len(DATA)) is None
    assert driver.dropped["at_read"] == 1
    assert set(await listed(driver)) == {OTHER}
    assert not path.exists()
    await driver.close()


@pytest.mark.parametrize("size", [0, 1, 71, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, SIZE - 1, SIZE + 1])
@pytest.mark.parametrize("running", [False, True])
async def test_a_file_of_another_length_is_dropped(directory: Path, size: int, running: bool) -> None:
    """Shorter as after a loss of power, or longer; seen at the start, or by a driver that runs."""
    path = await filled(directory)
    driver = await opened(directory)
    if not running:
        await driver.close()
    os.truncate(path, size)
    if not running:
        driver = await opened(directory)
    assert await get_bytes(driver, KEY, len(DATA)) is None
    assert set(await listed(driver)) == {OTHER}
    assert (driver.dropped["at_start"], driver.dropped["at_read"]) == ((0, 1) if running else (1, 0))
    assert driver.usage()[0] == SIZE
    assert not path.exists()
    await driver.close()


async def test_a_file_of_zeros_as_a_loss_of_power_leaves_it_is_dropped(directory: Path) -> None:
    path = await filled(directory)
    path.write_bytes(path.read_bytes()[:HEADER_BYTES] + bytes(len(DATA)))
    block_file(directory, OTHER).write_bytes(bytes(SIZE))
    driver = await opened(directory)
    assert await get_bytes(driver, KEY, len(DATA)) is None
    assert await listed(driver) == {}
    await driver.close()


async def test_a_block_under_another_ones_name_is_dropped(directory: Path) -> None:
    path = await filled(directory)
    block_file(directory, OTHER).rename(path)
    driver = await opened(directory)
    assert await listed(driver) == {}
    await driver.close()


async def test_a_read_that_failed_drops_no_block_that_came_meanwhile(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await filled(directory)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    driver = await opened(directory)
    loop, again = asyncio.get_running_loop(), payload(len(DATA), seed=2)

    def slowly(fd: int, parts: Parts, offset: int) -> bytes | None:
        digest = read_all(fd, parts, offset)
        asyncio.run_coroutine_threadsafe(put_bytes(driver, KEY, again), loop).result(60)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(disk_files, "read_all", slowly)
        assert await get_bytes(driver, KEY, len(DATA)) is None
    assert await get_bytes(driver, KEY, len(DATA)) == again
    assert driver.dropped["at_read"] == 0
    await driver.close()


async def test_a_block_of_the_next_version_is_not_served(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = await filled(directory)
    with monkeypatch.context() as patch:
        patch.setattr(record, "VERSION", record.VERSION + 1)
        path.write_bytes(pack_header(record_of(KEY, DATA)) + DATA)
    driver = await opened(directory)
    assert set(await listed(driver)) == {OTHER}
    await driver.put(record_of(KEY, DATA), cut(DATA))
    assert await get_bytes(driver, KEY, len(DATA)) == DATA
    await driver.close()
