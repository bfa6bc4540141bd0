"""A transfer ends in the middle, and its pages go to another ticket at once: the other's bytes are untouched, whatever
the first one's sender, receiver or wire still do. Real sidecars, over shared memory and TCP; every byte of the
receiver's pool is compared."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from shared.protocol.reports import LinkAddress
from shared.runtime.errors import TransferError
from tests.contract.transfer_links import LAYOUT, NIXL, Pair, expected_pool
from tests.contract.transfer_trio import PIECES, TABLE, Trio, make_trio, pid, receipt_of_a_whole_transfer, until_whole
from tests.support_wire import Break, Wire

pytestmark = pytest.mark.asyncio(loop_scope="module")
KINDS = ["shm", "tcp", NIXL]
STALL_S = 1.0

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=KINDS)
async def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    made = await make_trio(request.param, tmp_path_factory.mktemp("ipc"), slow=True)
    yield made
    await asyncio.gather(*(side.close() for side in made.sides))


async def test_the_client_leaves_and_its_pages_go_to_another_request(trio: Trio) -> None:
    """D fences, P does not even know yet: what P's sidecar goes on sending must not land."""
    key, secret, first = await trio.open()
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(trio.attempt(key, secret))
        await asyncio.wait_for(first.wait(), 30)
        await asyncio.wait_for(trio.receiver.link.fence(key), 10)
        other = await trio.other_ticket()
        assert isinstance(await sending, TransferError)
    await other.check()
    assert isinstance(await trio.attempt(key, secret), TransferError)  # P tries again: the room is dead
    await other.check()
    await other.end()
    await trio.slow.link.forget(key)


async def test_the_source_pages_are_free_once_the_sender_has_forgotten(trio: Trio) -> None:
    """The other way round: P is told first and reuses its pages at once. What D has by then is never whole."""
    key, secret, first = await trio.open()
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(trio.attempt(key, secret))
        await asyncio.wait_for(first.wait(), 30)
        await asyncio.wait_for(trio.slow.link.forget(key), 10)
        trio.slow.scramble()  # another prompt's state
        assert isinstance(await sending, TransferError)
    assert all(component.num_bytes == 0 for component in await trio.slow.link.sent(key))
    await asyncio.wait_for(trio.receiver.link.fence(key), 10)
    other = await trio.other_ticket()
    await other.end()


async def test_a_frozen_sender_wakes_when_its_pages_are_anothers(trio: Trio) -> None:
    key, secret, first = await trio.open()
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(trio.attempt(key, secret))
        await asyncio.wait_for(first.wait(), 30)
        os.kill(pid(trio.slow), signal.SIGSTOP)
        try:
            await asyncio.wait_for(trio.receiver.link.fence(key), 10)
            other = await trio.other_ticket()
        finally:
            os.kill(pid(trio.slow), signal.SIGCONT)
        assert isinstance(await sending, TransferError)
    await other.check()
    await trio.slow.link.forget(key)
    await other.end()


async def test_a_frozen_receiver_is_killed_before_its_pages_are_anothers(trio: Trio, eventually: Eventually) -> None:
    """Its own worker asks for the proof and gets no answer: the death of the process is the proof. It is not woken, so
    it cannot write, and the pages serve again under a new sidecar."""
    key, secret, first = await trio.open()
    old, restarts = pid(trio.receiver), len(trio.receiver.restarts)
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(trio.attempt(key, secret))
        await asyncio.wait_for(first.wait(), 30)
        os.kill(old, signal.SIGSTOP)
        await asyncio.wait_for(trio.receiver.link.fence(key), 20)
        with pytest.raises(ProcessLookupError):
            os.kill(old, signal.SIGCONT)
        assert isinstance(await sending, TransferError)
    await eventually(lambda: len(trio.receiver.restarts) > restarts)
    other = await trio.other_ticket()
    await other.end()
    await trio.slow.link.forget(key)


async def test_a_frozen_receiver_cannot_hold_the_senders_pages(trio: Trio) -> None:
    """P lets go at once. Woken, the receiver may finish its copy into pages of its own that are still that ticket's;
    what it then has is not what P signed for, and P signs no more."""
    key, secret, first = await trio.open()
    signed = await receipt_of_a_whole_transfer(trio)
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(trio.attempt(key, secret))
        await asyncio.wait_for(first.wait(), 30)
        os.kill(pid(trio.receiver), signal.SIGSTOP)
        try:
            await asyncio.wait_for(trio.slow.link.forget(key), 10)
            trio.slow.scramble()
        finally:
            os.kill(pid(trio.receiver), signal.SIGCONT)
        assert isinstance(await sending, TransferError)
    assert await trio.receiver.link.received(key) != signed
    assert all(component.num_bytes == 0 for component in await trio.slow.link.sent(key))
    await asyncio.wait_for(trio.receiver.link.fence(key), 10)
    other = await trio.other_ticket()
    await other.end()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def wired(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Trio, Wire]]:
    """Over TCP, with a wire between the first sender and the receiver, and sidecars that lose patience soon."""
    flags = ("--stall-timeout-s", str(STALL_S), "--peer-timeout-s", str(STALL_S))
    made = await make_trio("tcp", tmp_path_factory.mktemp("ipc"), slow=False, flags=flags)
    address = made.receiver.link.address
    with Wire((address.host, address.port)) as wire:
        yield made, wire
        await asyncio.gather(*(side.close() for side in made.sides))


def by(wire: Wire, trio: Trio) -> LinkAddress:
    return trio.receiver.link.address.model_copy(update={"port": wire.address[1]})


@pytest.mark.parametrize("fault", [Break.HOLE, Break.HALF, Break.RESET, Break.END], ids=lambda fault: fault.value)
@pytest.mark.parametrize("where", ["before", "within", "near the end"])
async def test_a_broken_wire_ends_the_transfer_and_frees_its_pages(
    wired: tuple[Trio, Wire], fault: Break, where: str
) -> None:
    trio, wire = wired
    wire.heal()
    key, secret, _ = await trio.open()
    passed = wire.passed
    assert await trio.attempt(key, secret, by(wire, trio)) is None  # so many bytes are a transfer, greeting and all
    whole = wire.passed - passed
    await trio.receiver.link.fence(key)
    await trio.slow.link.forget(key)
    wire.heal()  # the connection that was kept ends as well
    key, secret, first = await trio.open()
    wire.break_after(fault, {"before": 0, "within": whole - 3000, "near the end": whole - 100}[where])
    async with asyncio.timeout(15 * STALL_S):
        assert isinstance(await trio.attempt(key, secret, by(wire, trio)), TransferError)
    if where == "before":
        assert not first.is_set()
    else:
        await asyncio.wait_for(first.wait(), 30)
    async with asyncio.timeout(20.0):
        await trio.receiver.link.fence(key)
    other = await trio.other_ticket()
    async with asyncio.timeout(20.0):
        await trio.slow.link.forget(key)
    wire.heal()
    await other.check()
    await other.end()
    key = await until_whole(trio, by(wire, trio))  # the wire is whole again, and so is the peer
    assert await trio.receiver.link.received(key) == await trio.slow.link.sent(key)
    await trio.receiver.link.fence(key)
    await trio.slow.link.forget(key)


async def test_a_slow_wire_costs_time_only(wired: tuple[Trio, Wire]) -> None:
    """Longer than a stall in all, but never still for so long."""
    trio, wire = wired
    wire.heal()
    wire.break_after(Break.SLOW)
    key = await until_whole(trio, by(wire, trio))
    assert (trio.receiver.pool == expected_pool(Pair("tcp", trio.slow, trio.receiver), TABLE, PIECES)).all()
    assert await trio.receiver.link.received(key) == await trio.slow.link.sent(key)
    await trio.receiver.link.fence(key)
    await trio.slow.link.forget(key)


async def test_the_layout_has_as_many_layers_as_a_slow_transfer_counts_on() -> None:
    assert sum(component.num_layers for component in LAYOUT.components) == 9
