"""Puts and loads that go wrong: what is not whole nobody sees, and in the end nothing is held."""

import os
import signal

import pytest

from services.kvstore.service import KvstoreService
from shared.protocol import subjects
from shared.protocol.messages import CommitStatus
from shared.protocol.store_messages import (
    OfferReply,
    OfferStatus,
    Stored,
    StoredReply,
)
from shared.runtime.errors import StoreUnavailable, TransferError, UnknownRoom
from shared.store.runs import BlockRun
from shared.transfer.link import TicketKey, digests_of
from tests.contract.kvstore.world import (
    DEADLINE_S,
    Ends,
    World,
    chain_of,
    offer_of,
    pid_of,
    say,
    send_pieces,
    units_of,
    until,
)
from tests.contract.transfer_links import new_ticket

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_put_that_stops_half_way_is_never_seen_and_its_units_come_back(
    ends: Ends, store: KvstoreService
) -> None:
    putter, _, _ = ends
    chain, pages = chain_of("half", 3), putter.pages_for(3)
    before = units_of(store)
    offer = offer_of(putter, chain, remaining_s=2.0)
    reply = await say(putter, store, subjects.OFFER, offer, OfferReply)
    assert units_of(store) == (before[0] - 3, 0)
    assert store.report().tickets["reserved"] == 3
    await send_pieces(putter, reply, TicketKey(offer.room, 1), pages, components=1)
    assert store.report().tickets["filling"] == 3
    assert await putter.num_found(chain) == 0
    await until(lambda: units_of(store) == before)
    assert await putter.num_found(chain) == 0
    record = Stored(room=offer.room, generation=1, components=())
    late = await say(putter, store, subjects.STORED, record, StoredReply)
    assert (late.status, late.code) == (CommitStatus.FAILED, "deadline_exceeded")
    with pytest.raises(TransferError):
        await send_pieces(putter, reply, TicketKey(offer.room, 1), pages)
    await putter.side.link.forget(TicketKey(offer.room, 1))
    assert await putter.put(chain, pages) == 3, "it may come again"


@pytest.mark.parametrize("wrong", ["digest", "half"])
async def test_bytes_that_are_not_those_that_were_sent_are_never_seen(
    ends: Ends, store: KvstoreService, wrong: str
) -> None:
    putter, _, _ = ends
    chain, pages = chain_of(f"wrong {wrong}", 2), putter.pages_for(2)
    before, offer = units_of(store), offer_of(putter, chain)
    key = TicketKey(offer.room, 1)
    reply = await say(putter, store, subjects.OFFER, offer, OfferReply)
    await send_pieces(putter, reply, key, pages, components=1 if wrong == "half" else 2)
    sent = list(digests_of(await putter.side.link.sent(key)))
    if wrong == "digest":
        sent[2] = sent[2].model_copy(update={"digest": sent[0].digest})
    record = Stored(room=offer.room, generation=1, components=tuple(sent))
    answer = await say(putter, store, subjects.STORED, record, StoredReply)
    expected = {"digest": "corrupt_state", "half": "protocol_error"}
    assert (answer.status, answer.code) == (CommitStatus.FAILED, expected[wrong])
    await until(lambda: units_of(store) == before)
    assert await putter.num_found(chain) == 0
    await putter.side.link.forget(key)


async def test_a_put_that_its_worker_gives_up_is_over_at_once(
    ends: Ends, store: KvstoreService, cluster: World
) -> None:
    """Its sidecar freezes, and then it dies."""
    slow = await cluster.add_worker(16)
    try:
        before, chain, pid = units_of(store), chain_of("killed", 3), pid_of(slow)
        os.kill(pid, signal.SIGSTOP)
        putting = cluster.tasks.spawn(slow.client.put(BlockRun.of(chain), slow.pages_for(3)), "put")
        await until(lambda: store.report().tickets.get("reserved") == 3)
        assert await ends[1].num_found(chain) == 0
        os.kill(pid, signal.SIGKILL)
        await until(lambda: putting.done() and units_of(store) == before)
        assert await ends[1].num_found(chain) == 0
    finally:
        cluster.workers.remove(slow)
        await slow.side.close()
        await slow.deps.bus.close()


async def test_a_load_into_a_ticket_that_does_not_want_it_fails_and_holds_nothing(
    ends: Ends, store: KvstoreService
) -> None:
    putter, loader, _ = ends
    chain, own = chain_of("unwanted", 2), loader.pages_for(2)
    await putter.put(chain, putter.pages_for(2))
    found = await loader.find(chain)
    assert found is not None
    deadline = loader.deps.clock.now() + DEADLINE_S
    async with loader.opened(own) as (key, _):
        with pytest.raises(TransferError):
            await loader.client.load(found, key, b"another secret", loader.side.link.address, deadline)
    async with loader.opened(own[:4]) as (key, secret):
        with pytest.raises(TransferError):
            await loader.client.load(found, key, secret, loader.side.link.address, deadline)
    closed, secret = new_ticket()
    with pytest.raises(TransferError):
        await loader.client.load(found, closed, secret, loader.side.link.address, deadline)
    await until(lambda: store.report().queues["loads"] == 0)
    assert store.report().queues["leases"] == 1
    assert (await loader.load(found, own)).num_blocks == 2, "the lease holds"
    await loader.client.release(found)
    with pytest.raises(UnknownRoom):
        await loader.load(found, own)


async def test_a_block_that_its_memory_has_damaged_is_not_sent(ends: Ends, store: KvstoreService) -> None:
    putter, loader, _ = ends
    chain, pages, own = chain_of("damaged", 3), putter.pages_for(3), loader.pages_for(3)
    await putter.put(chain, pages)
    assert store.namespaces is not None
    (namespace,) = store.namespaces
    entry = store.index.entries.find(chain[1])
    assert entry is not None
    assert entry.held is not None
    namespace.parts(entry.held.unit)[2][5] ^= 1
    found = await loader.find(chain)
    assert found is not None
    reply = await loader.load(found, own)
    assert reply.num_blocks == 1
    assert loader.rows(own)[:1] == putter.rows(pages)[:1]
    await loader.client.release(found)
    assert await loader.num_found(chain) == 1
    assert await putter.put(chain, pages) == 1, "what came after it is there"
    assert await loader.num_found(chain) == 3


async def test_its_own_sidecar_dies_and_what_is_whole_stays(ends: Ends, store: KvstoreService) -> None:
    putter, loader, _ = ends
    chain, pages, own = chain_of("survives", 3), putter.pages_for(3), loader.pages_for(3)
    await putter.put(chain, pages)
    before, offer = units_of(store), offer_of(putter, chain_of("does not", 2))
    reply = await say(putter, store, subjects.OFFER, offer, OfferReply)
    assert reply.status is OfferStatus.GRANTED
    assert store.namespaces is not None
    (namespace,) = store.namespaces
    pid, restarts = namespace.link.pid, namespace.link.restarts
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: namespace.link.restarts == restarts + 1)
    await until(lambda: units_of(store) == before)
    record = Stored(room=offer.room, generation=1, components=())
    answer = await say(putter, store, subjects.STORED, record, StoredReply)
    assert (answer.status, answer.code) == (CommitStatus.FAILED, "peer_lost")
    found = await loader.find(chain)
    assert found is not None
    assert (await loader.load(found, own)).num_blocks == 3
    assert loader.rows(own) == putter.rows(pages)
    await loader.client.release(found)
    assert await putter.put(chain_of("does not", 2), putter.pages_for(2)) == 2


async def test_a_store_that_is_not_there_costs_nothing_but_its_blocks(ends: Ends) -> None:
    putter, _, _ = ends
    stores = putter.client._stores
    putter.client._stores = lambda: {"gone": "gone-0000"}
    try:
        (outcome,) = await putter.client.put(BlockRun.of(chain_of("gone", 1)), putter.pages_for(1))
        assert isinstance(outcome.error, StoreUnavailable)
        assert await putter.find(chain_of("gone", 1)) is None
    finally:
        putter.client._stores = stores
