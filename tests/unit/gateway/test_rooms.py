"""Requests that wait for workers with room: in which order, how long, and what is kept for whom."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.admission import RoomQueue, Waiting
from services.gateway.breaker import Health
from services.gateway.router import DefaultPolicy
from services.gateway.workers import WorkerRegistry
from shared.runtime.clock import LoopClock
from shared.runtime.errors import BatonError, CapacityError, DeadlineExceeded, NoWorker, QueueFull
from tests.unit.gateway.reports import AUTO, registry, report


def queue(known: WorkerRegistry, max_queued: int = 2, queue_timeout_s: float = 5.0) -> RoomQueue:
    return RoomQueue(known, DefaultPolicy(), LoopClock(), max_queued=max_queued, queue_timeout_s=queue_timeout_s)


async def test_the_queue_is_bounded_in_length_and_time() -> None:
    known = registry()
    known.observe(report("prefill", "p0", 1))
    known.observe(report("decode", "d0"))
    rooms = queue(known, queue_timeout_s=0.2)
    far = asyncio.get_running_loop().time() + 60
    async with asyncio.TaskGroup() as clients:
        waiting = [
            clients.create_task(expect(CapacityError, rooms.wait(Waiting(far - 60), AUTO, 1, far))) for _ in range(2)
        ]
        await asyncio.sleep(0.05)
        assert rooms.num_waiting == 2
        await expect(QueueFull, rooms.wait(Waiting(far - 60), AUTO, 1, far))
    assert [w.result() for w in waiting] == ["overloaded", "overloaded"]
    assert rooms.num_waiting == 0


async def test_who_waits_first_is_served_first() -> None:
    known = registry()
    known.observe(report("prefill", "p0", 1))
    known.observe(report("decode", "d0"))
    rooms = queue(known)
    far = asyncio.get_running_loop().time() + 60
    served: list[int] = []

    async def client(number: int) -> None:
        await rooms.wait(Waiting(far - 60 + number / 1000), AUTO, number + 1, far)
        served.append(number)

    async with asyncio.timeout(10), asyncio.TaskGroup() as clients:
        clients.create_task(client(0))
        clients.create_task(client(1))
        while rooms.num_waiting < 2:
            await asyncio.sleep(0.001)
        known.observe(report("prefill", "p0", 15, sequence=2))
        while not served:
            await asyncio.sleep(0.001)
        assert (served, rooms.num_waiting) == ([0], 1)
        known.observe(report("prefill", "p0", 25, sequence=3))
    assert served == [0, 1]


async def test_a_client_that_leaves_as_it_is_served_gives_its_room_back() -> None:
    known = registry()
    known.observe(report("prefill", "p0", 1))
    known.observe(report("decode", "d0"))
    rooms = queue(known)
    far = asyncio.get_running_loop().time() + 60
    waiting = asyncio.get_running_loop().create_task(rooms.wait(Waiting(far - 60), AUTO, 7, far))
    while not rooms.num_waiting:
        await asyncio.sleep(0)
    known.observe(report("prefill", "p0", 15, sequence=2))
    (prefill,) = known.ready("prefill")
    async with asyncio.timeout(10):
        while not prefill.pending:
            await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert (prefill.pending, rooms.num_waiting) == ({}, 0)


async def test_who_comes_back_keeps_its_place_also_in_a_full_queue() -> None:
    known = registry()
    known.observe(report("prefill", "p0"))
    known.observe(report("decode", "d0"))
    rooms = queue(known, max_queued=1)
    far = asyncio.get_running_loop().time() + 60
    eldest = Waiting(far - 60)
    await rooms.wait(eldest, AUTO, 1, far)
    known.observe(report("prefill", "p0", 1, sequence=2))
    async with asyncio.timeout(10), asyncio.TaskGroup() as clients:
        younger = clients.create_task(rooms.wait(Waiting(far - 59.9), AUTO, 2, far))
        while rooms.num_waiting < 1:
            await asyncio.sleep(0)
        back = clients.create_task(rooms.wait(eldest, AUTO, 3, far))
        while rooms.num_waiting < 2:
            await asyncio.sleep(0)
        known.settle("p0-b0", 1, granted=False)
        known.observe(report("prefill", "p0", 12, sequence=3))
        await back
        assert not younger.done()
        known.observe(report("prefill", "p0", 40, sequence=4))


async def test_who_has_lost_its_workers_is_not_sent_away() -> None:
    """Neither for the queue's length nor for its time: its request came long ago, and its answer has begun."""
    known = registry()
    known.observe(report("prefill", "p0", 1))
    known.observe(report("decode", "d0"))
    rooms = queue(known, max_queued=1, queue_timeout_s=0.05)
    now = asyncio.get_running_loop().time()
    lost = Waiting(now - 500, returning=True, lost_at=now)
    async with asyncio.timeout(10), asyncio.TaskGroup() as clients:
        back = clients.create_task(rooms.wait(lost, AUTO, 1, now + 60))
        await expect(CapacityError, rooms.wait(Waiting(now), AUTO, 2, now + 60))
        assert not back.done()
        known.observe(report("prefill", "p0", 15, sequence=2))
        assert (await back).decode.report.id == "d0"
    known.observe(report("prefill", "p0", 1, sequence=3))
    await expect(DeadlineExceeded, rooms.wait(lost, AUTO, 3, asyncio.get_running_loop().time() + 0.2))


async def test_workers_that_are_gone_are_waited_for_a_while_by_who_was_served() -> None:
    known = registry()
    rooms = queue(known, queue_timeout_s=0.3)
    loop = asyncio.get_running_loop()
    now = loop.time()
    await expect(NoWorker, rooms.wait(Waiting(now), AUTO, 1, now + 60))
    assert loop.time() - now < 0.2
    await expect(NoWorker, rooms.wait(Waiting(now - 500, lost_at=now), AUTO, 2, now + 60))
    assert 0.3 <= loop.time() - now < 5.0
    async with asyncio.timeout(10), asyncio.TaskGroup() as clients:
        back = clients.create_task(rooms.wait(Waiting(now - 500, lost_at=loop.time()), AUTO, 3, now + 60))
        while not rooms.num_waiting:
            await asyncio.sleep(0)
        known.observe(report("decode", "d0", boot="b1"))
        assert (await back).path == "local"


async def test_what_a_due_request_lacks_is_kept_for_it_and_nothing_else() -> None:
    """The big one waits for D; a small one still goes to the other D, and the same P."""
    known = registry()
    known.observe(report("prefill", "p0"))
    known.observe(report("decode", "d0", 30))
    known.observe(report("decode", "d1", 20))
    rooms = queue(known, max_queued=8)
    now = asyncio.get_running_loop().time()
    big = replace(AUTO, prompt_len=50 * 16)
    async with asyncio.timeout(10), asyncio.TaskGroup() as clients:
        waiting = clients.create_task(rooms.wait(Waiting(now - 3), big, 1, now + 60))
        while not rooms.num_waiting:
            await asyncio.sleep(0)
        small = await rooms.wait(Waiting(now), AUTO, 2, now + 60)
        assert small.decode.report.id == "d1", "d0 is where the big one will fit first"
        assert small.prefill is not None
        known.observe(report("decode", "d0", 60, sequence=2))
        assert (await waiting).decode.report.id == "d0"


async def test_of_many_that_are_served_at_once_only_one_is_a_probe() -> None:
    known = registry()
    known.observe(report("prefill", "p0"))
    for name in ("d0", "d1"):
        known.observe(report("decode", name, queues={"preempted": 1}))
    rooms = queue(known, max_queued=8)
    now = asyncio.get_running_loop().time()
    for _ in range(rooms.breakers.settings.in_a_row):
        rooms.breakers.failed(("d0-b0", "decode"), now - 10, now - 10)
    assert rooms.breakers.report(now) == {("d0-b0", "decode"): Health.HALF_OPEN}
    async with asyncio.timeout(10), asyncio.TaskGroup() as clients:
        waiting = [clients.create_task(rooms.wait(Waiting(now), AUTO, room, now + 60)) for room in range(1, 5)]
        while rooms.num_waiting < len(waiting):
            await asyncio.sleep(0)
        known.observe(report("decode", "d1", sequence=2))
        known.observe(report("decode", "d0", sequence=2))
    chosen = [task.result().decode.report.id for task in waiting]
    assert sorted(chosen) == ["d0", "d1", "d1", "d1"]
    probe = waiting[chosen.index("d0")].result()
    assert rooms.breakers.shut(now) == {("d0-b0", "decode"): (1, 0.0)}
    rooms.breakers.released(probe.legs["decode"], 1 + chosen.index("d0"))
    assert rooms.breakers.shut(now) == {}


async def expect(kind: type[BatonError], waiting: Any) -> str:
    with pytest.raises(kind) as caught:
        await waiting
    return caught.value.code


async def test_a_demand_is_renewed_when_its_turn_has_come() -> None:
    """What another request has left behind meanwhile decides where this one goes."""
    known = registry()
    for name in ("d0", "d1"):
        known.observe(report("decode", name, 0))
    rooms = queue(known)
    far = asyncio.get_running_loop().time() + 60
    asked = replace(AUTO, path="local")
    waiting = asyncio.get_running_loop().create_task(
        rooms.wait(Waiting(far - 60), asked, 7, far, lambda demand: replace(demand, held={"d1-b0": 144}))
    )
    await asyncio.sleep(0.01)
    for name in ("d0", "d1"):
        known.observe(report("decode", name, 100, sequence=2))
    assert (await waiting).decode.report.id == "d1"
