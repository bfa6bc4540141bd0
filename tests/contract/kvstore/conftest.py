"""One kvstore and three workers' ends for each way that bytes go, kept for a whole module."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.kvstore.service import KvstoreService
from tests.contract.kvstore.world import Ends, World, at_rest, chain_of, until, world


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["shm", "tcp"])
async def kept(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, nats_url: str
) -> AsyncIterator[World]:
    async with world(nats_url, tmp_path_factory.mktemp("ipc"), request.param) as made:
        await made.start_store(f"store-{request.param}")
        for page_tokens in (16, 16, 32):
            await made.add_worker(page_tokens)
        await made.workers[0].put(chain_of("opens the namespace", 1), made.workers[0].pages_for(1))
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(kept: World) -> AsyncIterator[World]:
    """After each test the kvstore is where it was before, whatever blocks it has now."""
    yield kept
    (store,) = kept.stores.values()
    await until(lambda: at_rest(store.report()))


@pytest.fixture
def store(cluster: World) -> KvstoreService:
    (store,) = cluster.stores.values()
    return store


@pytest.fixture
def ends(cluster: World) -> Ends:
    """One that puts, with pages of 16; two that load, with pages of 16 and 32."""
    putter, loader, wide = cluster.workers
    putter.side.scramble()
    loader.side.poison()
    wide.side.poison()
    return putter, loader, wide
