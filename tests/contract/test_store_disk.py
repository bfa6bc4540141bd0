"""What the driver `disk` does with a directory that is damaged, full, shared, or not its own."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from stat import S_IMODE

import pytest

from shared.runtime.errors import StoreFull, StoreUnavailable
from shared.store.disk import DiskDriver
from shared.store.open import open_driver
from shared.store.options import DriverOptions
from shared.store.record import HEADER_BYTES, pack_header
from tests.contract.store_drivers import block_file, cut, get_bytes, key_of, listed, payload, put_bytes, record_of

KEY, OTHER = key_of(1), key_of(2)
DATA = payload(10_000, seed=1)
REPO = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "a" / "store"


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


SIZE = HEADER_BYTES + len(DATA)
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


async def test_what_is_damaged_is_said_once_and_what_is_foreign_is_left(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = await filled(directory)
    os.truncate(path, 100)
    (directory / "incoming" / "half").write_bytes(DATA)
    foreign = [directory / "notes.txt", path.parent / "lost+found", directory / "blocks" / "00" / path.name]
    for other in foreign:
        other.write_bytes(b"mine")
    with caplog.at_level(logging.WARNING):
        driver = await opened(directory)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "1 files that were never finished and 1 that are no whole blocks" in caplog.text
    assert "left alone 2 files" in caplog.text
    assert all(other.read_bytes() == b"mine" for other in foreign)
    assert list((directory / "incoming").iterdir()) == []
    assert set(await listed(driver)) == {OTHER}
    await driver.close()


async def test_a_file_that_somebody_removes_is_missed_and_no_more(directory: Path) -> None:
    path = await filled(directory)
    driver = await opened(directory)
    path.unlink()
    assert await get_bytes(driver, KEY, len(DATA)) is None
    assert driver.usage()[0] == SIZE
    block_file(directory, OTHER).unlink()
    assert await listed(driver) == {}
    assert driver.usage()[0] == 0
    await put_bytes(driver, KEY, DATA)
    assert await get_bytes(driver, KEY, len(DATA)) == DATA
    await driver.close()


async def test_a_directory_has_one_owner(directory: Path) -> None:
    driver = await opened(directory)
    with pytest.raises(StoreUnavailable, match=f"in use by process {os.getpid()}: each kvstore needs"):
        await open_driver("disk", DriverOptions(where=str(directory)))
    code = f"""
import asyncio
from shared.store.open import open_driver
from shared.store.options import DriverOptions
asyncio.run(open_driver("disk", DriverOptions(where={str(directory)!r})))
"""
    argv, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(REPO)}
    other = subprocess.run(argv, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert f"StoreUnavailable: {directory} is in use by process {os.getpid()}" in other.stderr
    await driver.close()
    assert subprocess.run(argv, cwd=REPO, env=env, check=False).returncode == 0, "a lock outlived its owner"


@pytest.mark.parametrize("where", ["/proc/store", "/dev/null/store"])
async def test_a_directory_that_cannot_be_is_an_error_of_the_store(where: str) -> None:
    with pytest.raises(StoreUnavailable, match="the store's disk"):
        await open_driver("disk", DriverOptions(where=where))


async def test_a_limit_that_shrank_refuses_until_there_is_room(directory: Path) -> None:
    await filled(directory)
    driver = await opened(directory, limit_bytes=SIZE + 100)
    assert driver.usage() == (2 * SIZE, SIZE + 100)
    assert await get_bytes(driver, KEY, len(DATA)) == DATA
    with pytest.raises(StoreFull):
        await put_bytes(driver, key_of(3), bytes(10))
    await driver.delete(KEY)
    await driver.delete(OTHER)
    await put_bytes(driver, key_of(3), DATA)
    await driver.close()


async def test_only_its_owner_may_read_what_people_wrote(directory: Path) -> None:
    path = await filled(directory)
    assert S_IMODE(path.stat().st_mode) == 0o600
    assert {S_IMODE(found.stat().st_mode) for found in (directory, path.parent, directory / "incoming")} == {0o700}


async def test_the_device_has_a_block_before_its_name_and_the_name_before_the_answer(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("pwritev", "fdatasync", "rename", "fsync"):

        def watched(*args: object, name: str = name, call: object = getattr(os, name)) -> object:
            calls.append(name)
            return call(*args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, watched)
    for fsync, wanted in ((True, "pwritev fdatasync rename fsync"), (False, "pwritev rename")):
        driver = DiskDriver(directory, fsync=fsync)
        await driver.open()
        calls.clear()
        await put_bytes(driver, KEY, DATA)
        assert " ".join(calls) == wanted
        await driver.close()


async def test_the_way_it_is_set_is_the_way_it_speaks() -> None:
    synced, unsynced = DiskDriver(Path("x"), fsync=True), DiskDriver(Path("x"), fsync=False)
    assert "loss of power" in synced.durability
    assert "may be missing" in unsynced.durability
    with pytest.raises(ValueError, match="needs a directory"):
        DiskDriver.from_options(DriverOptions())


async def test_a_record_that_no_header_can_say_is_a_mistake(directory: Path) -> None:
    driver = await opened(directory)
    with pytest.raises(ValueError, match="namespace and tenant"):
        await put_bytes(driver, KEY, DATA, "n" * HEADER_BYTES)
    assert driver.usage()[0] == 0
    assert list((directory / "incoming").iterdir()) == []
    await put_bytes(driver, KEY, DATA)
    await driver.close()


async def test_a_block_of_the_next_version_is_not_served(directory: Path) -> None:
    path = await filled(directory)
    record = replace(record_of(KEY, DATA), num_bytes=len(DATA))
    header = bytearray(pack_header(record))
    header[8] += 1
    path.write_bytes(bytes(header) + DATA)
    driver = await opened(directory)
    assert set(await listed(driver)) == {OTHER}
    await driver.put(record, cut(DATA))
    assert await get_bytes(driver, KEY, len(DATA)) == DATA
    await driver.close()
