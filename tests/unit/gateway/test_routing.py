"""Which workers are chosen, from reports alone; and that the gateway's own ledger stands in until a report counts."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.admission import RoomQueue, Waiting
from services.gateway.breaker import Health
from services.gateway.router import DefaultPolicy, Demand, Fleet, Route
from services.gateway.workers import Worker, WorkerRegistry
from shared.protocol.messages import Geometry, Pages, WorkerReport
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters
from shared.runtime.errors import CapacityError, NoWorker, QueueFull

GEOMETRY = Geometry(page_tokens=16, components=("kv",), unit_bytes=(1024,))


def report(role: str, name: str, free: int = 100, *, boot: str = "b0", sequence: int = 1, **more: Any) -> WorkerReport:
    values: dict[str, Any] = {
        "role": role,
        "id": name,
        "boot_id": boot,
        "pid": 1,
        "host": "h",
        "state": "ready",
        "identity": "same",
        "geometry": GEOMETRY,
        "pages": Pages(total=100, free=free),
        "slots": Pages(total=8, free=8),
        "sequence": sequence,
    }
    return WorkerReport(**(values | more))


def worker(role: str, name: str, free: int = 100, **more: Any) -> Worker:
    return Worker(report(role, name, free, **more), 0.0)


def choose(
    demand: Demand, prefills: list[Worker], decodes: list[Worker], refused: set[str] | None = None
) -> Route | None:
    return DefaultPolicy().choose(demand, Fleet(prefills, decodes, frozenset(refused or ())))


AUTO = Demand(prompt_len=160, num_choices=1, path="auto", strict=False)
STRICT = Demand(prompt_len=160, num_choices=1, path="auto", strict=True)
REMOTE = Demand(prompt_len=160, num_choices=1, path="remote", strict=False)
LOCAL = Demand(prompt_len=160, num_choices=1, path="local", strict=False)


def test_the_least_busy_prefill_and_the_emptiest_decode_are_chosen() -> None:
    prefills = [
        worker("prefill", "p0", 90, tickets={"computing": 3}),
        worker("prefill", "p1", 40, tickets={"waiting": 1}),
    ]
    decodes = [worker("decode", "d0", 20), worker("decode", "d1", 60)]
    route = choose(AUTO, prefills, decodes)
    assert route is not None
    assert (route.prefill and route.prefill.report.id, route.decode.report.id, route.path) == ("p1", "d1", "remote")


@pytest.mark.parametrize(("demand", "path"), [(AUTO, "local"), (LOCAL, "local"), (STRICT, None), (REMOTE, None)])
def test_without_a_prefill_worker(demand: Demand, path: str | None) -> None:
    if path is None:
        with pytest.raises(NoWorker):
            choose(demand, [], [worker("decode", "d0")])
    else:
        route = choose(demand, [], [worker("decode", "d0")])
        assert route is not None
        assert route.path == path


def test_where_prompts_are_computed_by_d_the_one_with_fewest_ahead_is_chosen() -> None:
    """Free pages say how much decodes there, which costs a prompt little."""
    roomy = worker("decode", "d0", 90, queues={"prefilling": 1})
    idle = worker("decode", "d1", 40, queues={"running": 9})
    route = choose(LOCAL, [], [roomy, idle])
    assert route is not None
    assert route.decode is idle
    idle.pending |= {1: 1, 2: 1}
    route = choose(AUTO, [], [roomy, idle])
    assert route is not None
    assert route.decode is roomy


async def test_a_worker_of_another_mode_is_named() -> None:
    known = registry()
    known.observe(report("decode", "d0", settings={"mode": "colocated"}))
    assert known.of_another_mode("colocated") is None
    known.observe(report("prefill", "p0", settings={"mode": "separated"}))
    assert known.of_another_mode("colocated") == "p0 runs in mode separated, the gateway in mode colocated"


def test_without_a_decode_worker_nothing_can_be_served() -> None:
    with pytest.raises(NoWorker, match="decode"):
        choose(LOCAL, [worker("prefill", "p0")], [])


def test_no_room_means_wait_and_not_another_path() -> None:
    busy = [worker("prefill", "p0", 9)]
    assert choose(AUTO, busy, [worker("decode", "d0")]) is None
    assert choose(AUTO, [worker("prefill", "p0")], [worker("decode", "d0", 10)]) is None
    assert choose(AUTO, [worker("prefill", "p0", 10)], [worker("decode", "d0", 11)]) is not None


def test_what_can_never_fit_is_asked_at_once_so_that_it_holds_nobody_up() -> None:
    """Only the worker itself can say that it never fits, and a busy one can as well as an idle one."""
    busy = [worker("prefill", "p0", 9)], [worker("decode", "d0", 9, slots=Pages(total=8, free=0))]
    assert choose(Demand(prompt_len=100_000, num_choices=1, path="auto", strict=False), *busy) is not None
    assert choose(Demand(prompt_len=16, num_choices=9, path="auto", strict=False), *busy) is not None
    assert choose(Demand(prompt_len=16, num_choices=8, path="auto", strict=False), *busy) is None


def test_a_prompt_goes_to_the_pool_it_fits_even_if_a_smaller_one_is_idle() -> None:
    big = Demand(prompt_len=1000, num_choices=1, path="auto", strict=False)
    small = worker("prefill", "p0", 50, pages=Pages(total=50, free=50))
    large = worker("prefill", "p1", 70, tickets={"computing": 3})
    route = choose(big, [small, large], [worker("decode", "d0")])
    assert route is not None
    assert route.prefill is large


def test_decode_workers_are_asked_by_their_own_arithmetic() -> None:
    """D takes growth_tokens a choice beyond the prompt, and nothing at all while it has preempted requests."""
    tight = worker("decode", "d0", 25, settings={"growth_tokens": 256})
    assert choose(replace(AUTO, max_tokens=1000), [worker("prefill", "p0")], [tight]) is None
    assert choose(replace(AUTO, max_tokens=16), [worker("prefill", "p0")], [tight]) is not None
    stuck = worker("decode", "d0", 90, queues={"preempted": 1})
    assert choose(AUTO, [worker("prefill", "p0")], [stuck]) is None


def test_workers_that_failed_this_request_come_last() -> None:
    decodes = [worker("decode", "d0", 90), worker("decode", "d1", 80)]
    wary = replace(AUTO, avoid=frozenset({decodes[0].peer}))
    route = choose(wary, [worker("prefill", "p0")], decodes)
    assert route is not None
    assert route.decode is decodes[1]
    route = choose(wary, [worker("prefill", "p0")], decodes[:1])
    assert route is not None
    assert route.decode is decodes[0]


def test_a_refusal_counts_until_the_next_report() -> None:
    prefill, decode = worker("prefill", "p0"), worker("decode", "d0")
    assert choose(AUTO, [prefill], [decode], {decode.peer}) is None


def test_workers_of_another_model_are_never_paired() -> None:
    prefill, decode = worker("prefill", "p0", identity="m:int8"), worker("decode", "d0", identity="m:float16")
    with pytest.raises(NoWorker, match=r"holds the model.*prefill holds m:int8, decode holds m:float16"):
        choose(AUTO, [prefill], [decode])


def registry() -> WorkerRegistry:
    return WorkerRegistry(LoopClock(), Counters(), worker_timeout_s=0.05)


async def test_what_was_asked_for_is_charged_until_a_report_counts_it() -> None:
    known = registry()
    known.observe(report("decode", "d0", 50))
    (found,) = known.ready("decode")
    known.charge(found.peer, 7, 20)
    assert found.free_pages == 30
    known.observe(report("decode", "d0", 50, sequence=2))
    assert found.free_pages == 30, "the report was made before the worker's yes"
    known.settle(found.peer, 7, granted=True)
    assert found.free_pages == 30
    known.observe(report("decode", "d0", 30, sequence=3))
    assert found.free_pages == 30
    known.charge(found.peer, 8, 5)
    known.settle(found.peer, 8, granted=False)
    assert found.free_pages == 30


async def test_late_reports_and_earlier_boots_change_nothing() -> None:
    known = registry()
    known.observe(report("decode", "d0", 50, sequence=5))
    known.observe(report("decode", "d0", 99, sequence=4))
    assert known.ready("decode")[0].free_pages == 50
    known.observe(report("decode", "d0", 70, boot="b1"))
    assert [w.peer for w in known.ready("decode")] == ["d0-b1"]
    assert not known.is_alive("d0-b0")
    known.observe(report("decode", "d0", 99, sequence=9))
    assert [w.peer for w in known.ready("decode")] == ["d0-b1"], "a late report of the old boot brings nothing back"


async def test_silence_is_noticed_by_time_alone() -> None:
    known = registry()
    known.observe(report("decode", "d0"))
    await asyncio.sleep(0.08)
    assert known.is_alive("d0-b0")
    known.sweep()
    assert not known.is_alive("d0-b0")


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


async def expect(kind: type[CapacityError], waiting: Any) -> str:
    with pytest.raises(kind) as caught:
        await waiting
    return caught.value.code
