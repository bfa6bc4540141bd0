"""`make bench-store-drivers`: blocks put into and read from each driver of the store, beside the raw device.

Driver and rival take turns, so that whatever else the machine does meets both alike. `docs/benchmarks.md` says what
each row means. ARGS="--help" lists the options.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

import xxhash
from rich.console import Console

from benchmarks.report import Machine, Row, figure, print_rows, write_rows
from benchmarks.store_rivals import Load, RawFile, RawMemory, Rival
from shared.store.driver import BlockRecord
from shared.store.open import open_driver
from shared.store.options import DriverOptions
from shared.store.parts import digest_of

_MIB = 1 << 20
_PARTS, _PART_BYTES = 30, 64 * 2 * 3 * 64 * 4
"""A block of the default model: 64 tokens, keys and values of 3 heads of 64 float32 in each of 30 layers."""
_AT_ONCE = (1, 4)


@dataclass(frozen=True, slots=True)
class Case:
    """A driver and what it is held against. options, rival: made for an empty directory of their own. forget: makes the
    driver's reads miss the page cache."""

    name: str
    driver: str
    options: Callable[[Path], DriverOptions]
    rival: Callable[[Load, Path], Rival]
    forget: Callable[[Path], None] | None = None


def _forget_files(directory: Path) -> None:
    for path in (directory / "store").rglob("*.block"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


CASES = (
    Case("memory", "memory", lambda directory: DriverOptions(), lambda load, directory: RawMemory(load)),
    Case(
        "disk",
        "disk",
        lambda directory: DriverOptions(str(directory / "store")),
        lambda load, directory: RawFile(load, directory / "raw", synced=True),
        _forget_files,
    ),
    Case(
        "disk-unsynced",
        "disk",
        lambda directory: DriverOptions(str(directory / "store"), fsync=False),
        lambda load, directory: RawFile(load, directory / "raw", synced=False),
    ),
)


@dataclass(slots=True)
class Figures:
    """Seconds of each round, by name."""

    ours: dict[str, list[float]] = field(default_factory=dict)
    bare: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, ours_s: float, bare_s: float) -> None:
        self.ours.setdefault(name, []).append(ours_s)
        self.bare.setdefault(name, []).append(bare_s)

    def rows(self, load: Load) -> list[Row]:
        mib = load.num_blocks * load.block_bytes / _MIB
        return [
            figure(
                name,
                "MiB/s",
                [mib / seconds for seconds in runs],
                less_is_better=False,
                against=median(mib / seconds for seconds in self.bare[name]),
            )
            for name, runs in self.ours.items()
        ]


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    console, machine = Console(highlight=False), Machine.here()
    load = Load.of(max(1, args.mib * _MIB // (_PARTS * _PART_BYTES)), _PARTS, _PART_BYTES)
    rows: list[Row] = []
    for case in CASES:
        if case.name in args.rows:
            console.print(f"{case.name}: {load.num_blocks} blocks, {args.rounds} rounds …")
            with tempfile.TemporaryDirectory(dir=args.directory) as directory:
                rows += asyncio.run(_case(case, load, Path(directory), args.rounds))
    title = f"bench-store-drivers: blocks of {load.block_bytes / _MIB:.2f} MiB in {_PARTS} pieces"
    print_rows(console, title, rows, machine)
    console.print(f"written to {write_rows('store_drivers', rows, machine)}", soft_wrap=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="make bench-store-drivers", description=__doc__)
    parser.add_argument("--rows", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="bytes put and read in each round")
    parser.add_argument("--directory", help="on the device to be measured; else where temporary files go")
    args = parser.parse_args(argv)
    args.rows = [name for name in args.rows.split(",") if name]
    if unknown := set(args.rows) - set(names):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    return args


async def _case(case: Case, load: Load, directory: Path, rounds: int) -> list[Row]:
    figures = Figures()
    driver = await open_driver(case.driver, case.options(directory))
    rival = case.rival(load, directory)
    records = [_record(load, number) for number in range(load.num_blocks)]

    async def put(k: int) -> None:
        await driver.put(records[k], load.parts(k))

    async def get(k: int) -> None:
        if await driver.get(records[k].key, records[k].namespace, load.places(k)) is None:
            raise RuntimeError("the driver does not have what was put into it")

    try:
        for number in range(rounds + 1):
            found = figures if number else Figures()  # the first one does not count
            for at_once in _AT_ONCE:
                for record in records:
                    await driver.delete(record.key)
                end = f"x{at_once}"
                found.add(f"put-{case.name}-{end}", await _timed(put, load, at_once), rival.put_s(at_once))
                found.add(f"get-{case.name}-{end}", await _timed(get, load, at_once), rival.get_s(at_once))
                if case.forget is not None:
                    case.forget(directory)
                    rival.forget()
                    found.add(f"get-{case.name}-cold-{end}", await _timed(get, load, at_once), rival.get_s(at_once))
    finally:
        rival.close()
        await driver.close()
    return figures.rows(load)


async def _timed(call: Callable[[int], Awaitable[None]], load: Load, at_once: int) -> float:
    numbers = iter(range(load.num_blocks))

    async def work() -> None:
        for number in numbers:
            await call(number)

    begin = perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return perf_counter() - begin


def _record(load: Load, number: int) -> BlockRecord:
    key = xxhash.xxh3_128_digest(number.to_bytes(8, "little"))
    return BlockRecord(key, load.block_bytes, digest_of(load.parts(number)), "bench", "bench", 64)


if __name__ == "__main__":
    main()
