"""Hand-offs over a slow link between two hosts, alone and beside a background copy that would fill it."""

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from benchmarks.report import Row, figure
from benchmarks.storm import storm
from benchmarks.transfer_ends import End, Work
from benchmarks.two_hosts import TwoHosts
from shared.transfer.classes import Standing, TrafficClass
from shared.transfer.link import Piece, TicketKey

_WORK = Work(64 << 10, 512, 1024)
_AIM = 1.3
_CHUNK, _LAST, _COPY = range(64), range(64, 80), range(_WORK.num_pages)
"""Pages of a hand-off's chunk, of its last one, and of a background transfer: 4, 1 and 32 MiB."""
_GAP_S = (0.05, 0.15)
_SECRET = b"benchmark-secret"
_MIB_IN_GIB = 1024
_rooms = itertools.count(1)


async def link_rows(hosts: TwoHosts, rounds: int, handoffs: int, rate: str, console: Console) -> list[Row]:
    """p99 of so many hand-offs in each round, alone and beside the copy, with classes and without."""
    p99: dict[str, list[float]] = {"idle": [], "on": [], "off": []}
    copied: dict[str, list[float]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as directory:
        async with (
            _pair(hosts, Path(directory) / "on", ()) as on,
            _pair(hosts, Path(directory) / "off", ("--traffic-classes", "false")) as off,
        ):
            for number in range(rounds + 1):  # the first one warms up and does not count
                console.print(f"hand-offs over {rate}, round {number} of {rounds} …")
                found = {"idle": await _p99_ms(on, handoffs)}
                for name, pair in (("on", on), ("off", off)):
                    async with storm(pair.copy, 1) as meter:
                        found[name] = await _p99_ms(pair, handoffs)
                    if number:
                        copied[name].append(meter.rate() * _MIB_IN_GIB)
                if number:
                    for name, value in found.items():
                        p99[name].append(value)
    aim = _AIM * median(p99["idle"])
    return [
        figure("isolation-link", "ms", p99["on"], against=aim, goal=1.0),
        figure("isolation-link-off", "ms", p99["off"], against=aim),
        figure("handoff-p99-alone", "ms", p99["idle"]),
        figure("background-beside", "MiB/s", copied["on"], less_is_better=False),
        figure("background-beside-off", "MiB/s", copied["off"], less_is_better=False),
    ]


@dataclass
class _Pair:
    """Two workers on two hosts."""

    sender: End
    receiver: End

    async def handoff_s(self) -> float:
        return await self._send((_CHUNK, TrafficClass.HANDOFF), (_LAST, TrafficClass.LAST))

    async def copy(self, _number: int) -> int:
        await self._send((_COPY, TrafficClass.BACKGROUND))
        return _WORK.num_bytes

    async def _send(self, *parts: tuple[Sequence[int], TrafficClass]) -> float:
        """One ticket: seconds from the first part's beginning to the last one's confirmation."""
        key, first = TicketKey(next(_rooms), 1), 0
        units = tuple(range(sum(len(pages) for pages, _ in parts)))
        await self.receiver.link.open(key, _SECRET, (units,), lambda _key: None)
        began = time.perf_counter()
        for pages, traffic in parts:
            piece = Piece(0, first, tuple(pages), _WORK.layout.components[0].unit_tokens)
            await self.sender.link.send(key, _SECRET, self.receiver.link.address, (piece,), standing=Standing(traffic))
            first += len(pages)
        took_s = time.perf_counter() - began
        await self.receiver.link.fence(key)
        await self.sender.link.forget(key)
        return took_s


@asynccontextmanager
async def _pair(hosts: TwoHosts, directory: Path, arguments: tuple[str, ...]) -> AsyncIterator[_Pair]:
    async with AsyncExitStack() as stack:
        ends = []
        for index, name in enumerate(("sender", "receiver")):
            with hosts.inside(index):
                end = await End.start(_WORK, name, "tcp", directory / name, arguments, hosts.addresses[index])
            stack.push_async_callback(end.close)
            ends.append(end)
        yield _Pair(*ends)


async def _p99_ms(pair: _Pair, count: int) -> float:
    """At uneven intervals, so that hand-offs meet the background at every point."""
    taken = []
    for gap_s in np.random.default_rng(0).uniform(*_GAP_S, count).tolist():
        await asyncio.sleep(gap_s)
        taken.append(1000 * await pair.handoff_s())
    return float(np.percentile(taken, 99))
