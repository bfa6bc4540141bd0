"""A kvstore between workers' ends: what one puts another one loads, byte for byte, and leases hold."""

import asyncio

import numpy as np
import pytest

from services.kvstore.service import KvstoreService
from shared.protocol import subjects
from shared.protocol.messages import CommitStatus, Verdict
from shared.protocol.store_messages import (
    Lease,
    Load,
    LoadReply,
    LoadStatus,
    Lookup,
    LookupReply,
    OfferReply,
    OfferStatus,
    Stored,
    StoredReply,
)
from shared.runtime.errors import BatonError, Corrupt
from shared.runtime.ids import new_room
from shared.store.runs import BlockRun
from shared.transfer.link import TicketKey, digests_of
from tests.contract.kvstore.world import (
    BLOCK_BYTES,
    DEADLINE_S,
    MIB_BLOCKS,
    Ends,
    Worker,
    World,
    at_rest,
    chain_of,
    offer_of,
    say,
    send_pieces,
    until,
)
from tests.contract.transfer_links import POISON

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_what_one_puts_others_load(ends: Ends, store: KvstoreService) -> None:
    putter, *loaders = ends
    chain, pages = chain_of("first", 5), putter.pages_for(5)
    assert await putter.put(chain, pages) == 5
    assert await putter.put(chain, pages) == 0, "it is there already"
    for loader in loaders:
        found = await loader.find((*chain, b"unknown block..."))
        assert found is not None
        assert (found.num_blocks, found.num_bytes, found.beneath) == (5, 5 * BLOCK_BYTES, ())
        own = loader.pages_for(5)
        reply = await loader.load(found, own)
        assert reply.num_blocks == 5
        assert sum(one.num_bytes for one in reply.components) == 5 * BLOCK_BYTES
        assert reply.backend == store.settings.transfer
        assert loader.rows(own) == putter.rows(pages)
        others = [page for page in range(loader.side.layout.num_pages) if page not in own]
        assert (loader.side.component(0)[:, others].view(np.uint8) == POISON).all()
        assert store.report().queues["leases"] == 1
        await loader.client.release(found)
        await until(lambda: store.report().queues["leases"] == 0)


async def test_a_chain_that_goes_on_brings_only_what_is_new(ends: Ends, store: KvstoreService) -> None:
    putter, loader, _ = ends
    chain, pages = chain_of("grows", 6), putter.pages_for(6)
    assert await putter.put(chain[:3], pages[:12]) == 3
    received = store.counters["blocks_stored"]
    assert await putter.put(chain[:5], pages[:20]) == 2
    assert await putter.put(chain, pages[20:], start=5) == 1
    assert store.counters["blocks_stored"] == received + 3
    own = loader.pages_for(6)
    found = await loader.find(chain, start=2)  # the first two are in its pages already
    assert found is not None
    assert found.num_blocks == 4
    await loader.load(found, own)
    assert loader.rows(own)[2:] == putter.rows(pages)[2:]
    assert (loader.side.component(0)[:, own[:8]].view(np.uint8) == POISON).all()
    await loader.client.release(found)


async def test_fewer_blocks_than_were_found_may_be_loaded(ends: Ends) -> None:
    putter, loader, _ = ends
    chain, pages, own = chain_of("fewer", 3), putter.pages_for(3), loader.pages_for(1)
    await putter.put(chain, pages)
    found = await loader.find(chain)
    assert found is not None
    async with loader.opened(own) as (key, secret):
        deadline = loader.deps.clock.now() + DEADLINE_S
        reply = await loader.client.load(found, key, secret, loader.side.link.address, deadline, num_blocks=1)
        await loader.client.check(key, reply)
    assert reply.num_blocks == 1
    assert loader.rows(own) == putter.rows(pages)[:1]
    await loader.client.release(found)


async def test_a_block_whose_parent_is_not_there_is_not_wanted(ends: Ends) -> None:
    putter, _, _ = ends
    chain = chain_of("orphan", 3)
    assert await putter.put(chain, putter.pages_for(1), start=2) == 0
    assert await putter.num_found(chain) == 0


async def test_questions_that_are_asked_again_get_the_same_answer(ends: Ends, store: KvstoreService) -> None:
    putter, loader, _ = ends
    chain, pages, own = chain_of("again", 2), putter.pages_for(2), loader.pages_for(2)
    offer = offer_of(putter, chain)
    key = TicketKey(offer.room, 1)
    reply, again = await asyncio.gather(*(say(putter, store, subjects.OFFER, offer, OfferReply) for _ in range(2)))
    assert (reply.status, reply.wanted, reply.held) == (OfferStatus.GRANTED, (0, 1), 0)
    assert (reply.secret, reply.wanted) == (again.secret, again.wanted)
    await send_pieces(putter, reply, key, pages)
    record = Stored(room=offer.room, generation=1, components=digests_of(await putter.side.link.sent(key)))
    for _ in range(2):
        assert (await say(putter, store, subjects.STORED, record, StoredReply)).status is CommitStatus.COMMITTED
    late = await say(putter, store, subjects.OFFER, offer, OfferReply)
    assert (late.status, late.code) == (OfferStatus.REFUSED, "dead_room")
    await putter.side.link.forget(key)

    question = Lookup(lease=new_room(), namespace=loader.client.namespace, keys=chain, remaining_s=DEADLINE_S)
    for _ in range(2):
        assert (await say(loader, store, subjects.LOOKUP, question, LookupReply)).num_blocks == 2
    assert store.report().queues["leases"] == 1
    async with loader.opened(own) as (ticket, secret):
        order = Load(
            room=ticket.room,
            generation=1,
            lease=question.lease,
            num_blocks=2,
            link=loader.side.link.address,
            secret=secret,
            remaining_s=DEADLINE_S,
        )
        replies = await asyncio.gather(*(say(loader, store, subjects.LOAD, order, LoadReply) for _ in range(2)))
        while replies[0].status is LoadStatus.PENDING:
            replies[0] = await say(loader, store, subjects.LOAD, order, LoadReply)
        replies += [await say(loader, store, subjects.LOAD, order, LoadReply)]
        assert {one.status for one in (replies[0], replies[2])} == {LoadStatus.DONE}
        assert replies[2] == replies[0]
        other = order.model_copy(update={"lease": 5})
        assert (await say(loader, store, subjects.LOAD, other, LoadReply)) == replies[0], "it is over"
    assert loader.rows(own) == putter.rows(pages)
    release = Lease(lease=question.lease, remaining_s=0)
    assert [(await say(loader, store, subjects.LEASE, release, Verdict)).ok for _ in range(2)] == [True, True]
    assert (await say(loader, store, subjects.LOOKUP, question, LookupReply)).num_blocks == 0, "it came too late"
    longer = Lease(lease=question.lease, remaining_s=5)
    assert not (await say(loader, store, subjects.LEASE, longer, Verdict)).ok
    assert (await say(loader, store, subjects.LOAD, order.model_copy(update={"room": 77}), LoadReply)).code == (
        "unknown_room"
    )


async def test_a_lease_ends_by_itself_unless_it_is_extended(ends: Ends, store: KvstoreService) -> None:
    putter, loader, _ = ends
    chain = chain_of("leased", 1)
    await putter.put(chain, putter.pages_for(1))
    ended = store.counters["leases_ended"]
    question = Lookup(lease=new_room(), namespace=loader.client.namespace, keys=chain, remaining_s=0.3)
    assert (await say(loader, store, subjects.LOOKUP, question, LookupReply)).num_blocks == 1
    found = await loader.find(chain)
    assert found is not None
    await until(lambda: store.counters["leases_ended"] == ended + 1)
    assert store.report().queues["leases"] == 1
    longer = await loader.client.extend(found, 60.0)
    assert longer is not None
    assert longer.deadline > found.deadline
    await loader.client.release(longer)
    assert await loader.client.extend(found, 60.0) is None


async def test_leased_blocks_stay_while_others_fill_the_memory(ends: Ends, store: KvstoreService) -> None:
    putter, loader, _ = ends
    chain, pages, own = chain_of("stays", 4), putter.pages_for(4), loader.pages_for(4)
    await putter.put(chain, pages)
    expected = putter.rows(pages)
    found = await loader.find(chain)
    assert found is not None
    evicted = store.counters["blocks_evicted"]
    for k in range(3):
        flood = putter.pages_for(20, start=k)
        for part in range(3):
            await putter.put(chain_of(f"flood {k} {part}", 20), flood)
    assert store.counters["blocks_evicted"] > evicted
    assert (await loader.load(found, own)).num_blocks == 4
    assert loader.rows(own) == expected
    await loader.client.release(found)


async def test_a_reader_compares_what_it_got(ends: Ends) -> None:
    putter, loader, _ = ends
    chain, own = chain_of("compared", 1), loader.pages_for(1)
    await putter.put(chain, putter.pages_for(1))
    found = await loader.find(chain)
    assert found is not None
    async with loader.opened(own) as (key, secret):
        deadline = loader.deps.clock.now() + DEADLINE_S
        reply = await loader.client.load(found, key, secret, loader.side.link.address, deadline)
        other = reply.components[2].model_copy(update={"digest": "00"})
        with pytest.raises(Corrupt, match="index"):
            await loader.client.check(key, reply.model_copy(update={"components": (*reply.components[:2], other)}))
    await loader.client.release(found)


async def test_blocks_of_another_identity_are_another_namespace_s(ends: Ends, store: KvstoreService) -> None:
    putter, loader, _ = ends
    chain = chain_of("identity", 2)
    await putter.put(chain, putter.pages_for(2))
    other = loader.client.namespace.model_copy(update={"identity": "sha256:other"})
    question = Lookup(lease=new_room(), namespace=other, keys=chain, remaining_s=DEADLINE_S)
    assert (await say(loader, store, subjects.LOOKUP, question, LookupReply)).num_blocks == 0
    broken = other.model_copy(update={"block_tokens": 32})
    offer = offer_of(putter, chain).model_copy(update={"namespace": broken})
    refused = await say(putter, store, subjects.OFFER, offer, OfferReply)
    assert (refused.status, refused.code) == (OfferStatus.REFUSED, "invalid_request")


async def test_many_at_once(ends: Ends, store: KvstoreService) -> None:
    """Puts and loads over each other in a memory that is too small for all: what is loaded is right, or not there."""
    putter, *loaders = ends
    pages = putter.pages_for(24)
    rows = putter.rows(pages)
    assert MIB_BLOCKS < 3 * 32

    async def put(k: int) -> None:
        at = k % 8
        await putter.client.put(BlockRun.of(chain_of(f"many {k}", 3)), pages[at * 12 : (at + 1) * 12])

    async def load(k: int, loader: Worker, slot: int) -> int:
        each = 64 // loader.page_tokens
        own = loader.pages_for(24)[slot * 3 * each : (slot + 1) * 3 * each]
        found = await loader.find(chain_of(f"many {k}", 3))
        if found is None:
            return 0
        try:
            reply = await loader.load(found, own)
        except BatonError:
            return 0
        finally:
            await loader.client.release(found)
        at = (k % 8) * 3
        assert loader.rows(own)[: reply.num_blocks] == rows[at : at + reply.num_blocks]
        return reply.num_blocks

    loaded = 0
    for turn in range(4):
        async with asyncio.TaskGroup() as group:
            for k in range(turn * 8, turn * 8 + 8):
                group.create_task(put(k))
            tasks = [
                group.create_task(load(max(0, turn * 8 - 8) + k, loader, k)) for loader in loaders for k in range(8)
            ]
        loaded += sum(task.result() for task in tasks)
    assert loaded > 0
    await until(lambda: at_rest(store.report()))


async def test_who_asks_all_the_time_sees_all_of_a_put_or_nothing(ends: Ends, cluster: World) -> None:
    putter, loader, _ = ends
    pages, own = putter.pages_for(3), loader.pages_for(3)
    for turn in range(25):
        putter.side.scramble()
        chain = chain_of(f"polled {turn}", 3)
        putting = cluster.tasks.spawn(putter.put(chain, pages), "put")
        async with asyncio.timeout(DEADLINE_S):
            while (found := await loader.find(chain)) is None:
                pass
        assert found.num_blocks == 3
        assert (await loader.load(found, own)).num_blocks == 3
        assert loader.rows(own) == putter.rows(pages)
        await loader.client.release(found)
        await putting
