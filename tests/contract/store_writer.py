"""A process that puts blocks into a directory until it is killed, for the crash tests.

    python -m tests.contract.store_writer DIRECTORY SEED FSYNC DIE_AT

Each line on its standard output is a put that has returned: the key's number and the version. DIE_AT: it kills itself
before that call into the file system (see CALLS), counted from the first put; 0: it goes on until somebody else does.
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from shared.store.disk import DiskDriver
from tests.contract.store_drivers import cut, key_of, payload, record_of

CALLS = ("open", "pwritev", "fdatasync", "rename", "fsync", "unlink", "close")
NUM_KEYS = 6
MAX_BYTES = 300_000


def block(number: int, version: int) -> bytes:
    """Every version of a block has a size and bytes of its own."""
    size = random.Random(f"{number} {version}").randrange(MAX_BYTES)
    return payload(size, seed=number * 100_000 + version)


async def write(directory: Path, seed: int, fsync: bool, die_at: int) -> None:
    driver = DiskDriver(directory, fsync=fsync)
    await driver.open()
    if die_at:
        _die_before_call(die_at)
    versions = random.Random(seed)
    await asyncio.gather(*(_put_for_ever(driver, number, versions) for number in range(1 if die_at else NUM_KEYS)))


async def _put_for_ever(driver: DiskDriver, number: int, versions: random.Random) -> None:
    """One put of a key at a time, so that the one told last is the one that is there."""
    while True:
        version = versions.randrange(1, 100_000)
        data = block(number, version)
        os.write(1, f"begun {number} {version}\n".encode())
        await driver.put(record_of(key_of(number), data, tokens=version), cut(data, (1000, 70_000)))
        os.write(1, f"done {number} {version}\n".encode())


def _die_before_call(die_at: int) -> None:
    left = die_at

    def watched(call: Callable[..., object]) -> Callable[..., object]:
        def watching(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return watching

    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "fsync", int(sys.argv[4])))
