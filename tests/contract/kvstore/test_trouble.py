"""A store that says one thing and does another, is full, or makes a worker stumble: nothing wrong is used, nothing
stays lent, and the next block brings it all again. As in `test_workers.py` everything is real but the engines."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from services.decode.loading import Loaded
from services.kvstore.service import KvstoreService
from shared.protocol.messages import ComponentDigest
from shared.protocol.store_messages import Load, LoadReply, LoadStatus
from shared.protocol.wire import WireModel
from shared.runtime.errors import Corrupt, StoreError
from shared.store.client import StoreClient
from shared.store.runs import BlockRun, Found, PutOutcome
from tests.contract.kvstore.test_workers import Bench, stored, tokens_of, with_stores
from tests.contract.kvstore.world import BLOCK, MIB_BLOCKS, Ends, Worker, at_rest, chain_of, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


def own_client(worker: Worker) -> StoreClient:
    """That a test may spoil: like the worker's, and its own."""
    return with_stores(worker, worker.client._stores)


def bend_loads(
    client: StoreClient,
    answer: Callable[[LoadReply], LoadReply] = lambda reply: reply,
    order: Callable[[Load], Load] = lambda load: load,
) -> None:
    """What this client asks for, and what it is told, is altered on its way."""
    ask = client._ask

    async def bent(peer: str, verb: str, message: Any, kind: type[WireModel], deadline: float) -> WireModel:
        reply = await ask(peer, verb, order(message) if isinstance(message, Load) else message, kind, deadline)
        return answer(reply) if isinstance(reply, LoadReply) and reply.status is LoadStatus.DONE else reply

    client._ask = bent  # type: ignore[method-assign,assignment]


def of_size(client: StoreClient, num_blocks: int, reply: LoadReply) -> tuple[ComponentDigest, ...]:
    sizes = client._bytes_of(num_blocks)
    pairs = zip(reply.components, sizes, strict=True)
    return tuple(one.model_copy(update={"num_bytes": size}) for one, (_, size) in pairs)


def fewer_bytes(_: StoreClient, reply: LoadReply) -> LoadReply:
    first, *others = reply.components
    less = first.model_copy(update={"num_bytes": first.num_bytes - 4})
    return reply.model_copy(update={"components": (less, *others)})


def one_component_less(_: StoreClient, reply: LoadReply) -> LoadReply:
    return reply.model_copy(update={"components": reply.components[:-1]})


def bytes_of_one_block(client: StoreClient, reply: LoadReply) -> LoadReply:
    return reply.model_copy(update={"components": of_size(client, 1, reply)})


def one_block_more(client: StoreClient, reply: LoadReply) -> LoadReply:
    return reply.model_copy(update={"num_blocks": 3, "components": of_size(client, 3, reply)})


def one_block_less(client: StoreClient, reply: LoadReply) -> LoadReply:
    return reply.model_copy(update={"num_blocks": 1, "components": of_size(client, 1, reply)})


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (fewer_bytes, "2 blocks are"),
        (one_component_less, "2 blocks are"),
        (bytes_of_one_block, "2 blocks are"),
        (one_block_more, "3 blocks were sent of 2"),
        (one_block_less, "is not what was sent"),
    ],
)
async def test_what_a_store_says_it_sent_is_compared_with_what_came(
    ends: Ends, store: KvstoreService, spoil: Callable[[StoreClient, LoadReply], LoadReply], why: str
) -> None:
    putter, loader, _ = ends
    tokens = tokens_of(spoil.__name__, 2 * BLOCK + 1)
    await stored(Bench(putter, 2), tokens)
    other = Bench(loader, 2)
    client = other.stores.client = own_client(loader)
    bend_loads(client, lambda reply: spoil(client, reply))
    counters = loader.deps.counters
    before = {name: counters[name] for name in ("loads_failed", "blocks_loaded")}
    loaded, ticket = await other.load(tokens)
    assert loaded == Loaded()
    assert (ticket.timings.loaded_tokens, ticket.timings.bytes) == (0, ())
    with pytest.raises(StoreError, match=f"0 positions of 64 could be brought back: .*{why}"):
        await other.load(tokens, load_least=BLOCK)
    assert {name: counters[name] - was for name, was in before.items()} == {"loads_failed": 2, "blocks_loaded": 0}
    await until(lambda: at_rest(store.report()))
    other.stores.client = loader.client
    assert (await other.load(tokens))[0].num_tokens == 2 * BLOCK


async def test_more_blocks_than_were_asked_for_are_not_taken_even_where_they_are_leased(ends: Ends) -> None:
    putter, loader, _ = ends
    chain, own = chain_of("asked for one", 2), loader.pages_for(2)
    await putter.put(chain, putter.pages_for(2))
    found = await loader.find(chain)
    assert found is not None
    client = own_client(loader)
    bend_loads(client, order=lambda load: load.model_copy(update={"num_blocks": 2}))
    async with loader.opened(own) as (key, secret):
        deadline = loader.deps.clock.now() + 30.0
        with pytest.raises(Corrupt, match="2 blocks were sent of 1"):
            await client.load(found, key, secret, loader.side.link.address, deadline, num_blocks=1)
    await client.release(found)


async def test_stores_that_do_not_answer_are_waited_for_once_whatever_may_have_been_lost(ends: Ends) -> None:
    """Nobody is answered before all have asked."""
    putter, loader, _ = ends
    tokens = tokens_of("all at once", 2 * BLOCK + 1)
    for came_by in ("int8", "fp16"):
        await stored(Bench(putter, 2), tokens, came_by=came_by)
    other, asked, all_have = Bench(loader, 2), list[BlockRun](), asyncio.Event()
    client = other.stores.client = own_client(loader)
    lookup = client.lookup

    async def slow(run: BlockRun, **how: Any) -> Found | None:
        asked.append(run)
        if len(asked) == 5:
            all_have.set()
        async with asyncio.timeout(60):
            await all_have.wait()
        return await lookup(run, **how)

    client.lookup = slow  # type: ignore[method-assign]
    loaded, _ = await other.load(tokens, kv_precision="auto")
    assert len({run.root for run in asked}) == len(asked) == 5
    assert (loaded.num_tokens, loaded.lossiest) == (2 * BLOCK, "fp16"), "of equal runs the one that lost least"


@pytest.mark.parametrize("waits", [False, True])
async def test_a_put_that_fails_as_none_should_keeps_nothing_lent(
    ends: Ends, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    """Also what completed meanwhile and waits behind it. The failure is in the log, and all is offered again."""
    putter, loader, _ = ends
    bench, tokens = Bench(putter, 4), tokens_of(f"stumbles {waits}", 4 * BLOCK + 1)
    client = bench.stores.client = own_client(putter)
    put, may_fail, offered = client.put, asyncio.Event(), list[tuple[int, int]]()

    async def stumbling(run: BlockRun, pages: Sequence[int], tenant: str) -> tuple[PutOutcome, ...]:
        offered.append((run.first_block, len(run.keys)))
        if len(offered) == 1:
            await may_fail.wait()
            raise RuntimeError("nobody has thought of this")
        return await put(run, pages, tenant)

    client.put = stumbling  # type: ignore[method-assign,assignment]
    checkpoint = bench.checkpoint(tokens)
    bench.reach(checkpoint, 2 * BLOCK)
    await until(lambda: offered)
    if waits:
        bench.reach(checkpoint, 3 * BLOCK)
        assert len(bench.lender.open_loans) == 2
    may_fail.set()
    await bench.quiet()
    await until(lambda: "nobody has thought of this" in caplog.text)
    assert bench.told == []
    bench.reach(checkpoint, 4 * BLOCK)
    await bench.quiet()
    assert offered == [(0, 2), (0, 4)]
    assert bench.told == [4 * BLOCK]
    assert (await Bench(loader, 4).load(tokens))[0].num_tokens == 4 * BLOCK


async def test_what_a_full_store_refuses_is_offered_again_with_the_next_block(
    ends: Ends, store: KvstoreService
) -> None:
    """Its memory is leased to others; when they let go there is room."""
    putter, loader, _ = ends
    chain, leases, is_full = chain_of("fills it", 2 * MIB_BLOCKS), list[Found](), False
    while not is_full:
        end = len(leases) + 1
        (outcome,) = await putter.client.put(BlockRun.of(chain, end - 1, end), putter.pages_for(1), "t")
        is_full = not outcome.sent
        found = await loader.find(chain[:end])
        assert found is not None
        leases.append(found)
    bench, tokens = Bench(putter, 2), tokens_of("refused", 2 * BLOCK + 1)
    checkpoint, before = bench.checkpoint(tokens), store.counters["received_offer"]
    bench.reach(checkpoint, BLOCK)
    await bench.quiet()
    assert (bench.told, store.counters["received_offer"]) == ([], before + 1)
    for found in leases:
        await loader.client.release(found)
    bench.stores._paused_until = 0.0
    bench.reach(checkpoint, BLOCK + 1)
    assert not bench.lender.open_loans, "it waits for the next block"
    bench.reach(checkpoint, 2 * BLOCK)
    await bench.quiet()
    assert bench.told == [2 * BLOCK]
    assert (await Bench(loader, 2).load(tokens))[0].num_tokens == 2 * BLOCK
