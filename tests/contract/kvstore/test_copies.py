"""Several kvstores: each chain has its homes, and with two copies the loss of a store loses no block."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shared.runtime.errors import BatonError
from shared.store.placement import ranked
from shared.store.roster import Roster
from shared.store.runs import BlockRun
from tests.contract.kvstore.world import World, chain_of, until, world

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = ("kvstore-0", "kvstore-1", "kvstore-2")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> AsyncIterator[World]:
    async with world(nats_url, tmp_path_factory.mktemp("ipc"), "auto") as made:
        await made.add_worker(16, copies=2)
        await made.add_worker(16, copies=2)
        for name in NAMES:
            await made.start_store(name)
        yield made


async def test_two_copies_and_a_loss(cluster: World) -> None:
    putter, loader = cluster.workers
    chain, pages, own = chain_of("copied", 4), putter.pages_for(4), loader.pages_for(4)
    order = ranked(chain[0], NAMES)
    outcomes = await putter.client.put(BlockRun.of(chain), pages)
    assert [(one.store, one.sent, one.held, one.error) for one in outcomes] == [
        (name, 4, 4, None) for name in order[:2]
    ]
    assert cluster.stores[order[2]].counters["received_offer"] == 0, "a put goes to its homes only"
    found = await loader.find(chain)
    assert found is not None
    assert found.store == order[0]
    assert cluster.stores[order[1]].counters["received_lookup"] == 0, "nobody else is asked where all of it is there"
    await cluster.end_store(order[0])
    with pytest.raises(BatonError):
        await loader.load(found, own, within_s=5.0)
    found = await loader.find(chain)
    assert found is not None
    assert (found.store, found.num_blocks) == (order[1], 4)
    await loader.load(found, own)
    assert loader.rows(own) == putter.rows(pages)
    await loader.client.release(found)
    # Whoever puts the chain again makes the second copy whole.
    outcomes = await putter.client.put(BlockRun.of(chain), pages)
    assert [(one.store, one.sent, one.held) for one in outcomes] == [(order[1], 0, 4), (order[2], 4, 4)]
    store = await cluster.start_store(order[0])
    assert store.counters["received_offer"] == 0
    found = await loader.find(chain)
    assert found is not None
    assert found.store == order[1], "a store that came back empty does not hide what the next one has"
    await loader.client.release(found)


async def test_a_worker_knows_the_stores_by_their_heartbeats(cluster: World) -> None:
    worker = cluster.workers[0]
    roster = Roster(worker.deps, timeout_s=2.0)
    await roster.start()
    try:
        expected = {name: store.peer for name, store in cluster.stores.items()}
        await until(lambda: roster.stores() == expected)
        gone = next(iter(expected))
        await cluster.end_store(gone)
        await until(lambda: gone not in roster.stores())
        again = await cluster.start_store(gone)
        await until(lambda: roster.stores().get(gone) == again.peer)
    finally:
        await roster.stop()
