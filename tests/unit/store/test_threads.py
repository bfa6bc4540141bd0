"""The threads in which drivers block: few, never overrun, and done with the caller's memory when the caller goes on."""

import asyncio
import threading

import pytest

from shared.runtime.errors import StoreUnavailable
from shared.store.threads import StoreThreads


class Gate:
    """Work that goes on when it is told to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.running = 0
        self.most = 0
        self.ended = 0
        self._lock = threading.Lock()

    def work(self) -> int:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.open.wait(60)
        with self._lock:
            self.running -= 1
            self.ended += 1
        return 7


async def until_running(gate: Gate, number: int) -> None:
    async with asyncio.timeout(60):
        while gate.running < number:
            await asyncio.sleep(0.001)


async def test_what_is_too_much_is_refused_and_the_rest_is_done() -> None:
    threads, gate = StoreThreads(2, "t", max_waiting=3), Gate()
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(threads.run(gate.work)) for _ in range(5)]
        await until_running(gate, 2)
        with pytest.raises(StoreUnavailable, match="3 calls wait"):
            await threads.run(gate.work)
        gate.open.set()
    assert [call.result() for call in calls] == [7] * 5
    assert gate.most == 2
    assert await threads.run(gate.work) == 7
    await threads.close()


async def test_a_cancelled_caller_goes_on_only_when_the_work_has_ended() -> None:
    threads, gate = StoreThreads(1, "t"), Gate()
    call = asyncio.get_running_loop().create_task(threads.run(gate.work))
    await until_running(gate, 1)
    for _ in range(3):
        call.cancel()
        await asyncio.sleep(0.005)
        assert not call.done()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert gate.ended == 1
    assert await threads.run(gate.work) == 7
    await threads.close()


async def test_who_waits_can_be_cancelled_at_once_and_leaves_no_gap() -> None:
    threads, gate = StoreThreads(1, "t"), Gate()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(threads.run(gate.work))
        await until_running(gate, 1)
        waiting = group.create_task(threads.run(gate.work))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not first.done()
        gate.open.set()
    assert (gate.ended, await threads.run(gate.work)) == (1, 7)
    await threads.close()


async def test_what_the_work_raises_the_caller_gets() -> None:
    threads = StoreThreads(1, "t")

    def fail() -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        await threads.run(fail)
    await threads.close()


async def test_closing_waits_for_the_running_and_refuses_the_waiting() -> None:
    threads, gate = StoreThreads(1, "t"), Gate()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(threads.run(gate.work))
        await until_running(gate, 1)
        waiting = group.create_task(_refused(threads, gate))
        closing = [group.create_task(threads.close()) for _ in range(2)]
        await asyncio.sleep(0.005)
        assert not any(task.done() for task in closing)
        gate.open.set()
    assert first.result() == 7
    assert waiting.result()
    assert gate.ended == 1
    await threads.close()


async def _refused(threads: StoreThreads, gate: Gate) -> bool:
    with pytest.raises(StoreUnavailable, match="closed"):
        await threads.run(gate.work)
    return True
