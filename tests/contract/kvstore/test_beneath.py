"""What lies beneath the kvstore's memory: blocks come back from there, also after a restart; and a driver that is full,
slow, damaged or away costs hits and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from services.kvstore.service import KvstoreService
from shared.runtime.errors import StoreFull, StoreUnavailable
from tests.contract.kvstore.dict_driver import DictDriver
from tests.contract.kvstore.world import BLOCK_BYTES, MIB_BLOCKS, Worker, World, at_rest, chain_of, until, world

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = 20


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> AsyncIterator[World]:
    async with world(nats_url, tmp_path_factory.mktemp("ipc"), "shm") as made:
        for page_tokens in (16, 32):
            await made.add_worker(page_tokens)
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(kept: World) -> AsyncIterator[World]:
    """Its kvstores are the test's own."""
    for worker in kept.workers:
        worker.side.scramble()
    yield kept
    for name, store in list(kept.stores.items()):
        await until(lambda store=store: at_rest(store.report()))
        await kept.end_store(name)


async def flood(worker: Worker, name: str, num_blocks: int = 2 * MIB_BLOCKS) -> None:
    """Other blocks, until no memory is left for those that were there."""
    for k in range(0, num_blocks, 24):
        await worker.put(chain_of(f"{name} {k}", 24), worker.pages_for(24, start=k))


async def written(store: KvstoreService, num_blocks: int) -> None:
    await until(lambda: store.counters["blocks_written"] >= num_blocks)


async def loads(loader: Worker, chain: tuple[bytes, ...], expected: list[bytes]) -> int:
    """How many leading blocks came; what came is right."""
    found = await loader.find(chain)
    if found is None:
        return 0
    own = loader.pages_for(len(chain))
    try:
        reply = await loader.load(found, own)
    finally:
        await loader.client.release(found)
    assert loader.rows(own)[: reply.num_blocks] == expected[: reply.num_blocks]
    return reply.num_blocks


async def test_blocks_that_left_memory_come_back(cluster: World) -> None:
    putter, loader = cluster.workers
    driver = DictDriver()
    store = await cluster.start_store("returning", driver)
    assert store.report().durability == DictDriver.durability
    chain, pages = chain_of("comes back", LONG), putter.pages_for(LONG)
    rows = putter.rows(pages)
    await putter.put(chain, pages)
    await written(store, LONG)
    await flood(putter, "returning")
    found = await loader.find(chain)
    assert found is not None
    assert (found.num_blocks, found.beneath) == (LONG, tuple(range(LONG)))
    await loader.client.release(found)
    assert await loads(loader, chain, rows) == LONG
    assert driver.gets == LONG
    assert await loads(loader, chain, rows) == LONG
    assert driver.gets == LONG, "they are in memory now"
    assert await putter.put(chain, pages) == 0


async def test_a_chain_longer_than_the_memory_is_loaded_through_it(cluster: World) -> None:
    """Several at a time, each holding room only while it sends."""
    putter, loader = cluster.workers
    store = await cluster.start_store("narrow", DictDriver())
    num_blocks = MIB_BLOCKS + 17
    chain, pages = chain_of("long", num_blocks), putter.pages_for(num_blocks)
    for end in (20, 40, num_blocks):
        await putter.put(chain[:end], pages[: 4 * end])
        await written(store, end)
    assert store.index.entries.num_beneath == num_blocks
    assert await loads(loader, chain, putter.rows(pages)) == num_blocks


async def test_a_restarted_kvstore_has_what_its_driver_has(cluster: World) -> None:
    putter, loader = cluster.workers
    driver = DictDriver()
    store = await cluster.start_store("restarted", driver)
    chain, pages = chain_of("survives", LONG), putter.pages_for(LONG)
    rows = putter.rows(pages)
    await putter.put(chain[:10], pages[:40])
    await written(store, 10)
    driver.gate.clear()  # what is put from here on is in memory only when the end comes
    await putter.put(chain, pages)
    assert await putter.num_found(chain) == LONG
    cut_off = {key: held for key, held in driver.blocks.items()}
    driver.gate.set()
    await cluster.end_store("restarted")
    driver.blocks = cut_off
    store = await cluster.start_store("restarted", driver)
    assert await putter.num_found(chain) == 10
    assert await loads(loader, chain, rows) == 10
    assert await putter.put(chain, pages) == LONG - 10
    assert await loads(loader, chain, rows) == LONG


async def test_an_ordered_end_writes_what_waits(cluster: World) -> None:
    putter, _ = cluster.workers
    driver = DictDriver()
    driver.gate.clear()
    await cluster.start_store("ordered", driver)
    await putter.put(chain_of("written at last", LONG), putter.pages_for(LONG))
    ending = asyncio.get_running_loop().call_later(0.2, driver.gate.set)
    await cluster.end_store("ordered")
    assert ending.when() < asyncio.get_running_loop().time()
    assert set(driver.blocks) == set(chain_of("written at last", LONG))


async def test_a_full_driver_makes_room_by_the_least(cluster: World) -> None:
    putter, loader = cluster.workers
    driver = DictDriver(limit=8 * BLOCK_BYTES)
    store = await cluster.start_store("full", driver)
    old, new = chain_of("old", 6), chain_of("new", 6)
    pages = putter.pages_for(6)
    rows = putter.rows(pages)
    await putter.put(old, pages)
    await written(store, 6)
    assert await loads(loader, old[:1], rows) == 1
    await putter.put(new, pages)
    await written(store, 12)
    assert len(driver.blocks) <= 8
    assert set(driver.blocks) >= {*new}
    assert await loads(loader, new, rows) == 6
    assert await putter.num_found(old) == 2, "its end went first"


@pytest.mark.parametrize("error", [StoreFull("no space left"), StoreUnavailable("the disk is gone")])
async def test_a_driver_that_takes_nothing_is_no_reason_not_to_serve(
    cluster: World, error: StoreFull | StoreUnavailable
) -> None:
    putter, loader = cluster.workers
    driver = DictDriver()
    driver.fails = error
    store = await cluster.start_store("failing", driver)
    chain, pages = chain_of("memory only", 4), putter.pages_for(4)
    rows = putter.rows(pages)
    assert await putter.put(chain, pages) == 4
    counter = "writes_refused" if isinstance(error, StoreFull) else "writes_failed"
    await until(lambda: store.counters[counter] > 0)
    assert await loads(loader, chain, rows) == 4
    driver.fails = None
    await until(lambda: store.beneath is not None and not store.beneath.is_away)
    await until(lambda: at_rest(store.report()))
    again = chain_of("later", 2)
    await putter.put(again, pages[:8])
    await until(lambda: set(again) <= set(driver.blocks))


async def test_what_waits_to_be_written_is_bounded(cluster: World) -> None:
    putter, _ = cluster.workers
    driver = DictDriver()
    driver.gate.clear()
    store = await cluster.start_store("slow", driver)
    await putter.put(chain_of("warm-up", 1), putter.pages_for(1))
    assert store.beneath is not None
    store.beneath._settings = replace(store.beneath._settings, max_waiting=8)
    await putter.put(chain_of("too many", 20), putter.pages_for(20))
    await until(lambda: store.counters["writes_dropped"] == 20 - 8 - 3)
    driver.gate.set()
    await until(lambda: at_rest(store.report()))
    assert len(driver.blocks) == 12


async def test_blocks_that_a_driver_does_not_bring_cost_the_rest_of_the_chain(cluster: World) -> None:
    putter, loader = cluster.workers
    driver = DictDriver()
    store = await cluster.start_store("damaged", driver)
    chain, pages = chain_of("damaged", 6), putter.pages_for(6)
    rows = putter.rows(pages)
    await putter.put(chain, pages)
    await written(store, 6)
    await flood(putter, "damaged")
    driver.damage(chain[4])
    assert await loads(loader, chain, rows) == 4
    assert await loader.num_found(chain) == 4
    assert chain[4] not in driver.blocks
    assert await putter.put(chain, pages) == 1
    assert await loads(loader, chain, rows) == 6


async def test_a_driver_that_is_away_has_nothing(cluster: World) -> None:
    """For a while it is not even asked, so that not every request waits for it."""
    putter, loader = cluster.workers
    driver = DictDriver()
    store = await cluster.start_store("away", driver)
    chain, pages = chain_of("away", 6), putter.pages_for(6)
    rows = putter.rows(pages)
    await putter.put(chain, pages)
    await written(store, 6)
    await flood(putter, "away")
    await until(lambda: at_rest(store.report()))
    found = await loader.find(chain)
    assert found is not None
    assert store.beneath is not None
    store.beneath._settings = replace(store.beneath._settings, away_s=300.0)
    driver.fails = StoreUnavailable("no route to host")
    with pytest.raises(StoreUnavailable):
        await loader.load(found, loader.pages_for(6))
    asked = driver.gets
    assert await loader.num_found(chain) == 0
    assert driver.gets == asked
    driver.fails = None
    await loader.client.release(found)
    store.beneath._away_until = 0.0
    assert await loads(loader, chain, rows) == 6


async def test_a_read_that_nobody_waits_for_any_more_still_ends_well(cluster: World) -> None:
    """The unit stays the driver's until it says that it is done."""
    putter, loader = cluster.workers
    driver = DictDriver()
    store = await cluster.start_store("hanging", driver)
    chain, pages = chain_of("hanging", 2), putter.pages_for(2)
    rows = putter.rows(pages)
    await putter.put(chain, pages)
    await written(store, 2)
    await flood(putter, "hanging")
    await until(lambda: at_rest(store.report()))
    found = await loader.find(chain)
    assert found is not None
    driver.gate.clear()
    with pytest.raises((StoreUnavailable, TimeoutError)):
        async with asyncio.timeout(1.0):
            await loader.load(found, loader.pages_for(2), within_s=0.5)
    await until(lambda: store.report().queues["loads"] == 0)
    assert store.report().tickets["filling"] == 2
    driver.gate.set()
    await until(lambda: "filling" not in store.report().tickets)
    assert await loads(loader, chain, rows) == 2
    await loader.client.release(found)
