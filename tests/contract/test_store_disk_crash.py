"""The driver `disk` killed at any moment: what was acknowledged is there, and nothing is there in part."""

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shared.store.disk import DiskDriver
from tests.contract.store_drivers import cut, get_bytes, key_of, listed, record_of
from tests.contract.store_writer import NUM_KEYS, block

REPO = Path(__file__).parents[2]


@dataclass
class Told:
    """By key: the version that was put last, and the one that may have been under way."""

    done: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)

    def hear(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                what, number, version = line.split()
                (self.done if what == "done" else self.begun)[int(number)] = int(version)


def writer(directory: Path, seed: int, fsync: bool, die_at: int = 0) -> "subprocess.Popen[str]":
    words = [str(directory), str(seed), "fsync" if fsync else "unsynced", str(die_at)]
    argv = [sys.executable, "-m", "tests.contract.store_writer", *words]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=REPO, env=env)


def killed_somewhere(directory: Path, seed: int, fsync: bool, told: Told) -> None:
    """At any moment from its first word on."""
    with writer(directory, seed, fsync) as process:
        assert process.stdout is not None
        told.hear(process.stdout.readline())
        time.sleep(random.Random(seed).random() * 0.1)
        process.kill()
        told.hear(process.stdout.read())


async def check(directory: Path, told: Told, fsync: bool) -> int:
    """All that is listed is whole and right; what was told is there, or the one after it. How many files were not
    finished."""
    driver = DiskDriver(directory, fsync=fsync)
    await driver.open()
    assert driver.dropped["at_start"] == 0, "a name was given to a part of a block"
    found = await listed(driver)
    assert set(found) >= {key_of(number) for number in told.done}
    numbers = {key_of(number): number for number in range(NUM_KEYS)}
    for key, record in found.items():
        number, version = numbers[key], record.tokens
        assert version in (told.done.get(number), told.begun.get(number))
        assert await get_bytes(driver, key, record.num_bytes) == block(number, version)
        told.done[number] = version
    assert driver.usage()[0] == sum(path.stat().st_size for path in (directory / "blocks").rglob("*.block"))
    assert list((directory / "incoming").iterdir()) == []
    await driver.close()
    return driver.dropped["unfinished"]


async def kill_often(directory: Path, times: int, fsync: bool) -> int:
    """How many files lay there unfinished in all."""
    told, unfinished = Told(), 0
    for seed in range(times):
        killed_somewhere(directory, seed, fsync, told)
        unfinished += await check(directory, told, fsync)
    assert len(told.done) == NUM_KEYS
    return unfinished


@pytest.mark.parametrize("fsync", [True, False])
async def test_killed_at_any_moment(tmp_path: Path, fsync: bool) -> None:
    await kill_often(tmp_path / "store", 5, fsync)


@pytest.mark.slow
@pytest.mark.parametrize("fsync", [True, False])
async def test_killed_at_any_moment_many_times(tmp_path: Path, fsync: bool) -> None:
    unfinished = await kill_often(tmp_path / "store", 80, fsync)
    assert unfinished > 10, "most of them met a put in its middle"


async def test_killed_before_each_call_into_the_file_system(tmp_path: Path) -> None:
    """A put makes: open, write, sync, close, rename, and open, sync, close of the directory."""
    replaced = []
    for die_at in range(1, 10):
        directory, told = tmp_path / str(die_at), Told(done={0: 1})
        driver = DiskDriver(directory)
        await driver.open()
        old = block(0, 1)
        await driver.put(record_of(key_of(0), old, tokens=1), cut(old))
        await driver.close()
        with writer(directory, die_at, True, die_at) as process:
            assert process.stdout is not None
            told.hear(process.stdout.read())
        await check(directory, told, True)
        replaced.append(told.done[0] != 1)
    assert replaced == [False] * 5 + [True] * 4, "the name is the sixth thing that happens"
