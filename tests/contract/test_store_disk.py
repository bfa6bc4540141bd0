"""What the driver `disk` does with a directory that is damaged, full, shared, or not its own."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from stat import S_IMODE

import pytest

from shared.runtime.errors import StoreError, StoreFull, StoreUnavailable
from shared.store.disk import DiskDriver
from shared.store.open import open_driver
from shared.store.options import DriverOptions
from shared.store.record import HEADER_BYTES
from tests.contract.store_drivers import block_file, get_bytes, key_of, listed, put_bytes
from tests.contract.store_on_disk import DATA, KEY, OTHER, SIZE, filled, opened

REPO = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "a" / "store"


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
from shared.store.parts import read_all
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


FAILURES = {
    "ENOSPC": StoreFull,
    "EDQUOT": StoreFull,
    "EFBIG": StoreFull,
    "EIO": StoreUnavailable,
    "EMFILE": StoreUnavailable,
    "EROFS": StoreUnavailable,
}


@pytest.mark.parametrize("call", ["open", "pwritev", "fdatasync", "rename"])
@pytest.mark.parametrize("error", FAILURES)
async def test_a_put_that_fails_at_any_step_leaves_what_was_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: str
) -> None:
    await filled(directory)
    driver = DiskDriver(directory)
    await driver.open()

    def fail(*args: object) -> int:
        raise OSError(getattr(errno, error), "as the test wants it")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match="as the test wants it") as failed:
            await put_bytes(driver, KEY, bytes(20_000))
    assert type(failed.value) is FAILURES[error]
    assert list((directory / "incoming").iterdir()) == []
    assert await get_bytes(driver, KEY, len(DATA)) == DATA
    assert driver.usage()[0] == 2 * SIZE
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
