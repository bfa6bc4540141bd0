"""What the outbox does with transfers that have no thread yet, and with work of a thread that nobody waits for."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.protocol.reports import LinkAddress
from shared.runtime.errors import TransferError
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.backend import Begun, Digests, Event, Manifest
from shared.transfer.channels import in_thread
from shared.transfer.classes import HANDOFF, Standing, TrafficClass
from shared.transfer.link import TicketKey
from shared.transfer.outbox import Outbox
from shared.transfer.quiet_threads import QuietThreads
from tests.contract.transfer_links import new_ticket

LAYOUT = PoolLayout((StateComponent("kv", IndexKind.PAGE, 4, (), (8,), "uint8", (0,)),), num_pages=4, num_slots=1)
BACKGROUND = Standing(TrafficClass.BACKGROUND)
DEADLINE_S = 30


class Held:
    """A channel whose transfers last until they are let, or aborted."""

    fit = None

    def __init__(self, begun: Callable[[], None]) -> None:
        self._begun, self._over, self._aborted = begun, threading.Event(), False
        self.transfers: list[TicketKey] = []

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        self.transfers.append(manifest.key)
        self._begun()
        assert self._over.wait(DEADLINE_S)
        if self._aborted:
            raise TransferError("aborted")
        return []

    def begin(self, manifest: Manifest) -> Begun | None:
        return None

    def let(self) -> None:
        self._over.set()

    def abort(self) -> None:
        self._aborted = True
        self._over.set()

    def is_idle(self) -> bool:
        return True

    def close(self) -> None: ...


class HeldBackend:
    name = "held"

    def __init__(self) -> None:
        self.channels: dict[str, Held] = {}
        self.begun = threading.Semaphore(0)

    def reaches(self, peer: LinkAddress) -> bool:
        return True

    def connect(self, peer: LinkAddress) -> Held:
        self.channels[peer.boot_id] = Held(self.begun.release)
        return self.channels[peer.boot_id]

    def close(self) -> None: ...


class Sending:
    """One thread for whatever is quiet, and one for the rest."""

    def __init__(self) -> None:
        self.backend = HeldBackend()
        self.outbox = Outbox(LAYOUT, (self.backend,), lambda key, backend: None)

    def start(
        self, peer: str, standing: Standing, again: TicketKey | None = None
    ) -> tuple[TicketKey, asyncio.Task[object]]:
        """Each to a peer of its own, so that they do not wait for seats. again: one more transfer of that ticket."""
        key, secret = new_ticket()
        key = again or key
        address = LinkAddress(boot_id=peer, host="h", port=1, socket="", backends=("held",))
        now = threading.Event()
        now.set()
        sending = self.outbox.send(key, secret, address, (), now, standing=standing)
        return key, asyncio.get_running_loop().create_task(sending)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.001)

    def is_queued(self, key: TicketKey) -> bool:
        ticket = self.outbox._tickets.get(key)
        return ticket is not None and ticket.job is not None


@pytest.fixture
async def sending(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sending]:
    monkeypatch.setattr("shared.transfer.outbox._MAX_QUIET_THREADS", 1)
    monkeypatch.setattr("shared.transfer.outbox._MAX_THREADS", 2)  # one connects while the other one sends
    made = Sending()
    yield made
    await made.outbox.close()


@pytest.mark.parametrize("standing", [BACKGROUND, Standing(TrafficClass.RECOVERY)])
async def test_who_is_forgotten_while_it_waits_for_a_thread_ends_at_once(sending: Sending, standing: Standing) -> None:
    first, running = sending.start("a", standing)
    await sending.until(lambda: sending.backend.begun.acquire(blocking=False))
    second, waiting = sending.start("b", standing)
    await sending.until(lambda: sending.is_queued(second))
    async with asyncio.timeout(DEADLINE_S / 2):
        await sending.outbox.forget(second)
        with pytest.raises(TransferError, match="before it began"):
            await waiting
    assert not running.done()
    sending.backend.channels["a"].let()
    await running
    third, last = sending.start("c", standing)
    await sending.until(lambda: sending.backend.begun.acquire(blocking=False))
    sending.backend.channels["c"].let()
    await last
    assert sending.backend.channels["b"].transfers == [], "its pages were read"
    for key in (first, third):
        await sending.outbox.forget(key)
    assert sending.outbox.num_tickets == 0


async def test_who_is_cancelled_while_it_waits_for_a_thread_ends_at_once(sending: Sending) -> None:
    first, running = sending.start("a", BACKGROUND)
    await sending.until(lambda: sending.backend.begun.acquire(blocking=False))
    second, waiting = sending.start("b", BACKGROUND)
    await sending.until(lambda: sending.is_queued(second))
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=DEADLINE_S / 2)
    assert waiting.cancelled()
    await sending.outbox.forget(second)
    assert not running.done()
    await sending.outbox.forget(first)
    with pytest.raises(TransferError, match=r"^aborted$"):
        await running
    assert sending.backend.channels["b"].transfers == []
    assert sending.outbox.num_tickets == 0


@pytest.mark.parametrize("first_of_all", [None, "cancelled"])
async def test_a_quiet_transfer_that_a_hand_off_waits_for_takes_any_thread(
    sending: Sending, first_of_all: str | None
) -> None:
    """Also where it waits for a quiet one already, and is ahead of nobody there."""
    blocking, running = sending.start("a", BACKGROUND)
    await sending.until(lambda: sending.backend.begun.acquire(blocking=False))
    key, waiting = sending.start("b", BACKGROUND)
    await sending.until(lambda: sending.is_queued(key))
    _, urgent = sending.start("b", HANDOFF, again=key)
    await sending.until(lambda: sending.backend.begun.acquire(blocking=False))
    if first_of_all:
        await sending.outbox.forget(key)
        for one in (waiting, urgent):
            with pytest.raises(TransferError):
                await one
        assert sending.backend.channels["b"].transfers == [key]
    else:
        sending.backend.channels["b"].let()
        await waiting
        await urgent
        assert sending.backend.channels["b"].transfers == [key, key]
    assert not running.done()
    sending.backend.channels["a"].let()
    await running
    for one_key in (blocking, key):
        await sending.outbox.forget(one_key)
    assert sending.outbox.num_tickets == 0


async def test_work_that_waits_in_two_queues_is_done_once() -> None:
    begun, over, done = threading.Event(), threading.Event(), []

    def block() -> None:
        begun.set()
        assert over.wait(DEADLINE_S)

    with ThreadPoolExecutor(1) as own, ThreadPoolExecutor(1) as others:
        quiet = QuietThreads(own, others)
        blocking = quiet.submit(block)
        assert begun.wait(DEADLINE_S)
        work, failing, cancelled = (quiet.submit(one) for one in (lambda: done.append(1), block_nobody, block))
        assert cancelled.cancel()
        for job in (work, work, failing, cancelled, blocking):
            quiet.hurry(job)
        work.result(DEADLINE_S)
        assert isinstance(failing.exception(DEADLINE_S), ZeroDivisionError)
        over.set()
    assert done == [1]
    assert blocking.done()
    assert cancelled.cancelled()


def block_nobody() -> None:
    raise ZeroDivisionError


async def test_hand_offs_do_not_wait_for_threads_of_what_is_quiet(sending: Sending) -> None:
    blocking, running = sending.start("a", BACKGROUND)
    await sending.until(lambda: sending.backend.begun.acquire(blocking=False))
    urgent, passing = sending.start("b", HANDOFF)
    await sending.until(lambda: sending.backend.begun.acquire(blocking=False))
    sending.backend.channels["b"].let()
    await passing
    assert not running.done()
    await sending.outbox.forget(blocking)
    await sending.outbox.forget(urgent)
    with pytest.raises(TransferError):
        await running


async def test_work_that_is_under_way_is_told_to_stop_and_waited_for() -> None:
    begun, over, aborted = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert over.wait(DEADLINE_S)

    with ThreadPoolExecutor(1) as threads:
        task = asyncio.get_running_loop().create_task(in_thread(threads, work, aborted.set))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        while not aborted.is_set():
            await asyncio.sleep(0.001)
        assert not task.done()
        over.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, DEADLINE_S)
