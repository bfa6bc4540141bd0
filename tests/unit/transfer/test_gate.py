"""Turns of real threads: who waits, who is woken, and that an end always gets through."""

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from shared.runtime.errors import TransferError
from shared.transfer.classes import Rules, Standing, TrafficClass
from shared.transfer.gate import Gate, GatedTurn

LAST, HANDOFF, RECOVERY, BACKGROUND = TrafficClass
BURST = 1000
STRICT = Rules(burst_bytes=BURST, width=1, promote_s=1e9, patience_s=1e9, shares=dict.fromkeys(TrafficClass, 0.0))


async def seated(gate: Gate, traffic: TrafficClass, priority: int = 0, link: str = "a") -> GatedTurn:
    turn = gate.enter(link, Standing(traffic, priority))
    await asyncio.wait_for(turn.seat(), 30)
    return turn


async def test_of_those_that_wait_the_most_urgent_is_woken() -> None:
    gate = Gate(STRICT)
    first = await seated(gate, HANDOFF)
    first.wait(BURST)
    woken: list[str] = []
    lock = threading.Lock()

    def send(name: str, turn: GatedTurn) -> None:
        turn.wait(BURST)
        with lock:
            woken.append(name)
        turn.leave()

    with ThreadPoolExecutor(4) as threads:
        others = {
            "background": await seated(gate, BACKGROUND),
            "later": await seated(gate, HANDOFF, priority=1),
            "recovery": await seated(gate, RECOVERY),
            "last": await seated(gate, LAST),
        }
        sending = [threads.submit(send, name, turn) for name, turn in others.items()]
        while sum(flow.asked > 0 for flow in list(gate.scheduler._flows)) < len(others):
            await asyncio.sleep(0.001)
        assert woken == []
        first.leave()
        await asyncio.gather(*map(asyncio.wrap_future, sending))
    assert woken == ["last", "later", "recovery", "background"]
    assert gate.num_transfers == 0


async def test_an_abort_ends_whoever_waits_for_a_burst_or_a_seat() -> None:
    gate = Gate(STRICT)
    holder, waiting = await seated(gate, HANDOFF), await seated(gate, BACKGROUND)
    holder.wait(BURST)
    queued = gate.enter("a", Standing(BACKGROUND))
    seat = asyncio.get_running_loop().create_task(queued.seat())
    with ThreadPoolExecutor(1) as threads:
        sending: Future[None] = threads.submit(waiting.wait, BURST)
        while not waiting._flow.asked:
            await asyncio.sleep(0.001)
        assert not seat.done()
        assert not sending.done()
        waiting.abort()
        assert isinstance(sending.exception(30), TransferError)
    queued.abort()
    with pytest.raises(TransferError):
        await asyncio.wait_for(seat, 30)
    for turn in (holder, waiting, queued, holder):
        turn.leave()
    assert gate.num_transfers == 0
    assert gate.scheduler.advance(gate.now()) == []


async def test_seats_are_by_class_and_come_free() -> None:
    gate = Gate(Rules())
    both = [await seated(gate, HANDOFF) for _ in range(2)]
    third = gate.enter("a", Standing(HANDOFF))
    seat = asyncio.get_running_loop().create_task(third.seat())
    for traffic in (LAST, RECOVERY, BACKGROUND):
        (await seated(gate, traffic)).leave()
    (await seated(gate, HANDOFF, link="b")).leave()
    assert not seat.done()
    both[0].leave()
    await asyncio.wait_for(seat, 30)


async def test_time_alone_gives_a_turn_where_nothing_else_happens() -> None:
    """A cap: the bucket fills, and nobody is there to tell."""
    gate = Gate(Rules(burst_bytes=BURST, background_bytes_per_s=20 * BURST))
    turn = await seated(gate, BACKGROUND)
    began = gate.now()
    with ThreadPoolExecutor(1) as threads:
        for _ in range(5):
            await asyncio.wait_for(asyncio.wrap_future(threads.submit(turn.wait, BURST)), 30)
    assert gate.now() - began >= 4 / 20 - 0.001
    assert 0.1 <= turn.waited_s <= gate.now() - began
    turn.leave()


async def test_at_once_takes_a_turn_only_if_it_is_there() -> None:
    gate = Gate(STRICT)
    turn = await seated(gate, HANDOFF)
    assert turn.at_once(BURST)
    assert turn._flow.burst == BURST
    assert turn.at_once(2 * BURST), "its own burst before is over"
    assert turn._flow.burst == 2 * BURST
    turn.leave()
    assert gate.num_transfers == 0


async def test_at_once_says_no_and_leaves_nothing_behind() -> None:
    """Neither does it get a turn later, which nobody would use, nor does it hold back who goes after it."""
    gate = Gate(STRICT)
    holder, asking, later = await seated(gate, LAST), await seated(gate, HANDOFF), await seated(gate, BACKGROUND)
    holder.wait(BURST)
    assert not asking.at_once(BURST)
    assert not asking._flow.has_something
    assert gate.scheduler.next_at(gate.now()) is None, "nobody waits"
    with ThreadPoolExecutor(1) as threads:
        sending: Future[None] = threads.submit(later.wait, BURST)
        while not later._flow.asked:
            await asyncio.sleep(0.001)
        holder.leave()
        await asyncio.wait_for(asyncio.wrap_future(sending), 30)
    assert not asking._flow.has_something
    asking.abort()
    with pytest.raises(TransferError):
        asking.at_once(BURST)
    asking.leave()
    later.leave()
    assert gate.num_transfers == 0


async def test_at_once_lets_those_go_on_whom_it_held_back() -> None:
    """It is ahead of the other one, but all that the cap has left is a burst as small as the other's."""
    gate = Gate(replace(STRICT, background_bytes_per_s=1.0, seats=dict.fromkeys(TrafficClass, 2)))
    asking, other = await seated(gate, BACKGROUND), await seated(gate, BACKGROUND, priority=1)
    assert asking.at_once(BURST)
    with ThreadPoolExecutor(1) as threads:
        sending: Future[None] = threads.submit(other.wait, 1)
        while not other._flow.asked:
            await asyncio.sleep(0.001)
        assert not asking.at_once(BURST)
        assert other._flow.burst == 1
        await asyncio.wait_for(asyncio.wrap_future(sending), 30)
    asking.leave()
    other.leave()
    assert gate.num_transfers == 0
