"""Classes and politeness over real sidecars: what is urgent passes what is not, and a cap is kept."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from shared.runtime.config_file import ConfigError
from shared.runtime.errors import TransferError
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.classes import Standing, TrafficClass
from shared.transfer.link import Piece, TicketKey
from shared.transfer.sidecar_link import SidecarLink
from shared.transfer.sidecar_options import SidecarOptions
from tests.contract.transfer_links import Side, new_ticket, sidecar_side

ROWS, ROW_BYTES, NUM_PAGES = 16, 1024, 64
LAYOUT = PoolLayout(
    (StateComponent("kv", IndexKind.PAGE, ROWS, (), (ROW_BYTES,), "uint8", (0, 1)),), num_pages=NUM_PAGES, num_slots=1
)
PAGE_BYTES = 2 * ROWS * ROW_BYTES
BURST = 64 << 10
HALF = Piece(0, 0, tuple(range(0, NUM_PAGES, 2)), ROWS)
"""1 MiB."""
FEW = Piece(0, 0, (1, 3), ROWS)
LAST, BACKGROUND = Standing(TrafficClass.LAST), Standing(TrafficClass.BACKGROUND)


@asynccontextmanager
async def pair_of(kind: str, directory: Path, cap: int) -> AsyncIterator[tuple[Side, Side]]:
    """Patient: a cap so low lets bursts through rarely."""
    arguments = ("--burst-bytes", str(BURST), "--background-bytes-per-s", str(cap), "--stall-timeout-s", "60")
    options = SidecarOptions("s", directory, transfer=kind, arguments=arguments)
    sides = await asyncio.gather(*(sidecar_side(options, LAYOUT) for _ in range(2)))
    sides[0].scramble()
    try:
        yield sides[0], sides[1]
    finally:
        for side in sides:
            await side.close()


def link_of(side: Side) -> SidecarLink:
    assert isinstance(side.link, SidecarLink)
    return side.link


async def opened(receiver: Side, first_page: int) -> tuple[TicketKey, bytes]:
    key, secret = new_ticket()
    await receiver.link.open(key, secret, (tuple(range(first_page, first_page + NUM_PAGES // 2)),), lambda _key: None)
    return key, secret


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_a_hand_off_passes_a_background_transfer_that_waits(kind: str, tmp_path: Path) -> None:
    async with pair_of(kind, tmp_path, cap=50_000) as pair, asyncio.timeout(60):
        sender, receiver = link_of(pair[0]), link_of(pair[1])
        slow, urgent = await opened(pair[1], 0), await opened(pair[1], NUM_PAGES // 2)
        sending = sender.send(*slow, receiver.address, (HALF,), standing=BACKGROUND)
        background = asyncio.get_running_loop().create_task(sending)  # takes 9 s or more
        while sender.actual_backend(slow[0]) is None:
            await asyncio.sleep(0.005)
        await sender.send(*urgent, receiver.address, (FEW,), standing=LAST)
        assert not background.done()
        assert await receiver.received(urgent[0]) == await sender.sent(urgent[0])
        counters = await sender.counters()
        assert (counters["class_last"], counters["class_last_bytes"]) == (1, 2 * PAGE_BYTES)
        (sent,) = sender.traffic
        assert (sent.traffic, sent.transfers, sent.bytes) == (TrafficClass.LAST, 1, {"kv": {"raw": 2 * PAGE_BYTES}})
        assert sent.busy_s > 0
        await sender.forget(slow[0])  # also while it waits for its turn
        with pytest.raises(TransferError):
            await background
        for key, _ in (slow, urgent):
            await receiver.fence(key)
        await sender.forget(urgent[0])


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_what_a_more_urgent_transfer_of_its_ticket_waits_for_is_as_urgent(kind: str, tmp_path: Path) -> None:
    """Otherwise the last chunk would wait 22 s or more for what was sent before it."""
    async with pair_of(kind, tmp_path, cap=20_000) as pair, asyncio.timeout(60):
        sender, receiver = link_of(pair[0]), link_of(pair[1])
        key, secret = await opened(pair[1], 0)
        parts = [Piece(0, 0, HALF.units[:30], ROWS), Piece(0, 30, HALF.units[30:], ROWS)]
        loop = asyncio.get_running_loop()
        slow = loop.create_task(sender.send(key, secret, receiver.address, (parts[0],), standing=BACKGROUND))
        while sender.actual_backend(key) is None:
            await asyncio.sleep(0.005)
        began = time.monotonic()
        await sender.send(key, secret, receiver.address, (parts[1],), standing=LAST)
        assert slow.done()
        assert time.monotonic() - began < 15
        assert await receiver.received(key) == await sender.sent(key)
        counters = await sender.counters()
        assert (counters["class_last"], counters["class_background"]) == (1, 1), "counted as what they were sent as"
        await receiver.fence(key)
        await sender.forget(key)


@pytest.mark.parametrize(("kind", "at_once"), [("shm", 8 * BURST), ("tcp", BURST)])
async def test_background_keeps_to_its_cap_and_arrives_whole(kind: str, at_once: int, tmp_path: Path) -> None:
    cap = 2_000_000
    async with pair_of(kind, tmp_path, cap) as pair, asyncio.timeout(60):
        sender, receiver = link_of(pair[0]), link_of(pair[1])
        key, secret = await opened(pair[1], 0)
        began = time.monotonic()
        await sender.send(key, secret, receiver.address, (HALF,), standing=BACKGROUND)
        num_bytes = len(HALF.units) * PAGE_BYTES
        assert time.monotonic() - began >= (num_bytes - at_once) / cap - 0.01
        assert await receiver.received(key) == await sender.sent(key)
        source, landed = pair[0].component(0), pair[1].component(0)
        assert np.array_equal(landed[:, : len(HALF.units)], source[:, list(HALF.units)])
        await receiver.fence(key)
        await sender.forget(key)


async def test_a_sidecar_runs_where_and_as_nice_as_it_is_told(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    arguments = ("--niceness", "3", "--cores", str(core))
    options = SidecarOptions("s", tmp_path, transfer="tcp", arguments=arguments)
    sides = [await sidecar_side(options, LAYOUT) for _ in range(2)]
    key, secret = await opened(sides[1], 0)
    await sides[0].link.send(key, secret, sides[1].link.address, (FEW,), standing=LAST)
    stepped_back = min(19, os.nice(0) + 3)
    for side in sides:
        pid = link_of(side).pid
        assert pid is not None
        tasks = [Path(f"/proc/{pid}/task/{thread}") for thread in os.listdir(f"/proc/{pid}/task")]
        assert {frozenset(os.sched_getaffinity(int(task.name))) for task in tasks} == {frozenset({core})}
        niceness = [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks]
        assert niceness.count(stepped_back) >= 2, "who accepts, and who sends or receives"
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.nice(0), "who answers the worker does not wait"
    for side in sides:
        await side.close()


async def test_a_sidecar_that_cannot_be_where_it_is_told_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = SidecarOptions("s", tmp_path, transfer="tcp", arguments=("--cores", "1000"))
    with pytest.raises(ConfigError):
        await sidecar_side(options, LAYOUT)
    assert "cores: 1000 are not ours to use" in capfd.readouterr().err
