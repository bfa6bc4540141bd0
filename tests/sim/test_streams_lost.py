"""What becomes of resumable streams that cannot be written down any more, and of more than may go on unread."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.gateway.streams import desk
from services.gateway.streams.desk import Streams
from shared.runtime.errors import JournalUnavailable, NotResumable
from tests.sim.asking import until
from tests.sim.cluster import Cluster
from tests.sim.test_streams import KEY, MANY, Client, plan_for, run_with

LONG = MANY | {"max_tokens": 600}


async def broken_by(streams: Streams, method: str, spoiled: Callable[..., Awaitable[Any]]) -> Client:
    """A client that reads while its gateway's journal does that from now on; returns once it has heard the end."""
    client = Client()
    found = await streams.open(plan_for(**LONG), KEY, 0)
    reading = asyncio.get_running_loop().create_task(client.read(found))
    await until(lambda: client.has[0] >= 5, 5.0)
    setattr(streams._journal, method, spoiled)
    async with asyncio.timeout(60.0):
        await reading
    return client


@pytest.mark.parametrize("error", [NotResumable("JetStream is off now"), RuntimeError("a bug")])
def test_a_reader_hears_that_the_journal_is_lost(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the reason; and a connection that comes later hears it as well."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        async def spoiled(*_: Any) -> Any:
            raise error

        client = await broken_by(one, "_open" if isinstance(error, NotResumable) else "replace", spoiled)
        assert isinstance(client.error, JournalUnavailable)
        assert 5 <= client.has[0] < 600
        assert cluster.gateways[0].counters["streams_unwritten"] == 1
        await cluster.settle()
        assert cluster.task_failures == []

    run_with(scenario, num_pages=1024)
    assert ("is given up" in caplog.text) is isinstance(error, RuntimeError)


def test_a_journal_that_forgot_the_stream_is_not_another_gateway() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        replace = one._journal.replace

        async def forgotten(*args: Any) -> Any:
            assert cluster.hub.stores is not None
            for store in cluster.hub.stores.values():
                store.entries.clear()
            return await replace(*args)

        client = await broken_by(one, "replace", forgotten)
        assert isinstance(client.error, JournalUnavailable)
        assert cluster.gateways[0].counters["streams_lost"] == 0
        await cluster.settle()

    run_with(scenario, num_pages=1024)


def test_more_than_may_go_on_unread_end_with_those_that_were_left_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "_LEAST_DETACHED", 2)
    monkeypatch.setattr(desk, "_DETACHED_SHARE", 100)

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        clients = [Client() for _ in range(4)]
        for client in clients:
            await client.read(await one.open(plan_for(**LONG), KEY, 0), leave_at=3)
        await until(lambda: cluster.gateways[0].counters["streams_expired"] == 2, 3.0)
        assert set(one._live) == {client.id for client in clients[2:]}
        await cluster.settle(within_s=60.0)

    run_with(scenario, num_pages=1024)


def test_streams_whose_time_is_over_end_at_once_though_the_journal_is_slow() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        clients = [Client() for _ in range(4)]
        for client in clients:
            await client.read(await one.open(plan_for(**LONG | {"max_tokens": 3000}), KEY, 0), leave_at=3)
        remove = one._journal.remove

        async def slow(*args: Any) -> None:
            await asyncio.sleep(10.0)
            await remove(*args)

        one._journal.remove = slow  # type: ignore[method-assign]
        await until(lambda: cluster.gateways[0].counters["streams_expired"] > 0, 60.0)
        await asyncio.sleep(2.0)
        assert cluster.gateways[0].counters["streams_expired"] == 4
        await cluster.settle()

    run_with(scenario, num_pages=4096)
