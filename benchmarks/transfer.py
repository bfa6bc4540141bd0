"""`make bench-transfer`: what the links move through two real sidecars, beside what the bare machine does.

The ways and what they are compared with take turns, so that whatever else the machine does meets all of them alike.
`docs/benchmarks.md` says what each row means. ARGS="--help" lists the options.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.handoff import gap_rows
from benchmarks.remap_descriptors import DESCRIPTORS, descriptor_rows
from benchmarks.report import Machine, Row, figure, print_rows, write_rows
from benchmarks.rivals import NotThere
from benchmarks.slow_link import link_rows
from benchmarks.transfer_ends import BareSocket, Ends, Work
from benchmarks.transfer_rivals import VERSUS, Versus
from benchmarks.two_hosts import NoLink, TwoHosts

_GIB, _MIB = 1 << 30, 1 << 20
_SPARE = 2
_SMALL_BYTES, _SMALL_AIM_US = 4096, 200.0


@dataclass(frozen=True, slots=True)
class Case:
    """A row: pages of this size over one way, beside a memcpy or a bare socket, and the ratio asked for."""

    name: str
    transfer: str
    page_bytes: int
    goal: float


CASES = (
    Case("shm-16k", "shm", 16 << 10, 0.7),
    Case("shm-64k", "shm", 64 << 10, 0.9),
    Case("shm-1m", "shm", 1 << 20, 0.9),
    Case("tcp-64k", "tcp", 64 << 10, 0.9),
)
_VERSUS_BYTES = 64 << 10
_DIGESTS = "shm-digests"
_MOST_FOR_DIGESTS = 1.15
_GAP, _LINK = "handoff-gap", "isolation-link"
_LINK_RATE, _LINK_ROUNDS, _LINK_HANDOFFS = "200mbit", 3, 30
_UNDIGESTED = ("--faults", "transfer.undigested=1")


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    console, machine = Console(highlight=False), Machine.here()
    num_bytes, missing = args.mib * _MIB, []
    rows: list[Row] = []

    def begin(name: str) -> bool:
        if name in args.rows:
            console.print(f"{name}: {args.mib} MiB, {args.rounds} rounds …")
        return name in args.rows

    for case in CASES:
        if begin(case.name):
            rows += asyncio.run(_case(case, num_bytes, args.rounds))
    if begin(_DIGESTS):
        rows += asyncio.run(_digests(num_bytes, args.rounds))
    for versus in VERSUS:
        if begin(versus.name):
            try:
                rows += asyncio.run(_versus(versus, num_bytes, args.rounds))
            except NotThere as error:
                missing.append(f"{versus.name}: {error}")
    if DESCRIPTORS in args.rows:
        rows += descriptor_rows()
    if "small" in args.rows:
        console.print(f"small: {args.pages} pages, one at a time …")
        rows += asyncio.run(_small(args.pages))
    if _GAP in args.rows:
        rows += gap_rows(console)
    if _LINK in args.rows:
        try:
            with TwoHosts(_LINK_RATE) as hosts:
                rows += asyncio.run(link_rows(hosts, _LINK_ROUNDS, _LINK_HANDOFFS, _LINK_RATE, console))
        except NoLink as why:
            missing.append(f"{_LINK}: {why}")
    print_rows(console, f"bench-transfer: {args.mib} MiB of scattered pages", rows, machine)
    for line in missing:
        console.print(f"not measured: {line}", style="yellow", soft_wrap=True)
    console.print(f"written to {write_rows('transfer', rows, machine)}", soft_wrap=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    ways = [*(case.name for case in CASES), _DIGESTS, *(versus.name for versus in VERSUS), "small"]
    names = [*ways, DESCRIPTORS, _GAP, _LINK]
    parser = argparse.ArgumentParser(prog="make bench-transfer", description=__doc__)
    parser.add_argument("--rows", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256, help="bytes moved in each round")
    parser.add_argument("--pages", type=int, default=1000, help="single pages sent for `small`")
    args = parser.parse_args(argv)
    args.rows = [name for name in args.rows.split(",") if name]
    if unknown := set(args.rows) - set(names):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    return args


async def _case(case: Case, num_bytes: int, rounds: int) -> list[Row]:
    num_pages = num_bytes // case.page_bytes
    work = Work(case.page_bytes, num_pages, _SPARE * num_pages)
    ours: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as directory, BareSocket(work) as bare_socket:
        async with await Ends.start(work, case.transfer, Path(directory)) as ends:
            await ends.warm_up()
            for number in range(rounds + 1):  # the first one does not count
                bare_s = bare_socket.send_s(number) if case.transfer == "tcp" else ends.memcpy_s()
                ours_s = await ends.send_s(number)
                if number:
                    bare.append(work.num_bytes / _GIB / bare_s)
                    ours.append(work.num_bytes / _GIB / ours_s)
    name = f"{case.name}-{'bare-socket' if case.transfer == 'tcp' else 'memcpy'}"
    against = figure(name, "GiB/s", bare, less_is_better=False)
    return [figure(case.name, "GiB/s", ours, less_is_better=False, against=against.value, goal=case.goal), against]


async def _digests(num_bytes: int, rounds: int) -> list[Row]:
    """Beside the same transfer without digests on either side."""
    num_pages = num_bytes // _VERSUS_BYTES
    work = Work(_VERSUS_BYTES, num_pages, _SPARE * num_pages)
    made: list[float] = []
    left_out: list[float] = []
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        async with (
            await Ends.start(work, "shm", Path(other), _UNDIGESTED) as plain,
            await Ends.start(work, "shm", Path(one)) as ends,
        ):
            await plain.warm_up()
            await ends.warm_up()
            for number in range(rounds + 1):
                plain_s, ours_s = await plain.send_s(number), await ends.send_s(number)
                if number:
                    left_out.append(work.num_bytes / _GIB / plain_s)
                    made.append(work.num_bytes / _GIB / ours_s)
    against = figure(f"{_DIGESTS}-without", "GiB/s", left_out, less_is_better=False)
    goal = round(1 / _MOST_FOR_DIGESTS, 2)
    return [figure(_DIGESTS, "GiB/s", made, less_is_better=False, against=against.value, goal=goal), against]


async def _versus(versus: Versus, num_bytes: int, rounds: int) -> list[Row]:
    """Raises NotThere where the rival cannot be had."""
    num_pages = num_bytes // _VERSUS_BYTES
    work = Work(_VERSUS_BYTES, num_pages, _SPARE * num_pages)
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as directory, versus.make(work) as rival:
        async with await Ends.start(work, versus.transfer, Path(directory)) as ends:
            await ends.warm_up()
            for number in range(rounds + 1):
                rival_s, ours_s = rival.ask("send", seed=number), await ends.send_s(number)
                if number:
                    theirs.append(work.num_bytes / _GIB / rival_s)
                    ours.append(work.num_bytes / _GIB / ours_s)
        name = f"{versus.name}-{rival.name}"
    against = figure(name, "GiB/s", theirs, less_is_better=False)
    return [figure(versus.name, "GiB/s", ours, less_is_better=False, against=against.value, goal=1.0), against]


async def _small(num_pages: int) -> list[Row]:
    work = Work(_SMALL_BYTES, 1, 64)
    with tempfile.TemporaryDirectory() as directory:
        async with await Ends.start(work, "shm", Path(directory)) as ends:
            await ends.warm_up()
            taken = [1e6 * await ends.send_s(number) for number in range(num_pages)]
    p99 = sorted(taken)[int(0.99 * len(taken))]
    rows = [figure("small", "µs", [median(taken)], against=_SMALL_AIM_US, goal=1.0)]
    return [*rows, figure("small-p99", "µs", [p99])]


if __name__ == "__main__":
    main()
