"""A stream has had several gateways: what an earlier one still says or is asked changes nothing for who has it now."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.gateway.streams.desk import Streams
from shared.bus.memory import Envelope
from shared.protocol.messages import Cancel, Replay
from shared.protocol.subjects import CANCEL, REPLAY
from shared.protocol.wire import decode
from shared.runtime.errors import JournalUnavailable, StreamMoved
from shared.worker.roll_call import EVERY_S
from tests.sim.asking import now, until, verb_of
from tests.sim.cluster import Cluster
from tests.sim.processes import Worker
from tests.sim.test_flows import oracle
from tests.sim.test_streams import GRACE_S, KEY, MANY, PROMPT, Client, plan_for, run_with, streams_of
from tests.sim.virtual_time import run_virtual

STEP_S = 0.05
LONG: dict[str, Any] = MANY | {"max_tokens": 260}
SLOW: dict[str, Any] = {"step_s": STEP_S, "num_pages": 512}


async def check_undisturbed(cluster: Cluster, client: Client, sampling: dict[str, Any] = LONG) -> None:
    """One ticket has served it to its end, whoever had it."""
    assert client.error is None
    assert client.tokens == await oracle(PROMPT, **sampling)
    assert client.timings["recoveries"] == 0
    assert client.timings["recovery"] == []
    assert sum(worker.counters["tickets_granted"] for worker in cluster.decodes) == 1
    assert sum(worker.counters["tickets_finished"] for worker in cluster.decodes) == 1


def test_who_gives_up_while_cut_off_does_not_end_the_ticket_of_who_goes_on() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        long = MANY | {"max_tokens": 540}
        first, client = Client(), Client()
        found = await one.open(plan_for(**long), KEY, 0)
        reading = asyncio.get_running_loop().create_task(first.read(found))
        await until(lambda: first.has[0] >= 5, 5.0)
        cluster.gateways[0].bus.cut()
        client.id = found.id
        going_on = asyncio.get_running_loop().create_task(client.come_back(two))
        await until(reading.done, 25.0)
        assert isinstance(first.error, JournalUnavailable)
        cluster.gateways[0].bus.mend()
        await until(lambda: cluster.decodes[0].counters["cancels_stale"] > 0, 4.0)
        await going_on
        await check_undisturbed(cluster, client, long)
        await cluster.settle(within_s=2 * GRACE_S)

    run_with(scenario, step_s=STEP_S, num_pages=1024)


def test_a_stream_that_expires_while_its_gateway_is_cut_off_goes_on_elsewhere() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client()
        await client.read(await one.open(plan_for(**LONG), KEY, 0), leave_at=5)
        cluster.gateways[0].bus.cut()
        going_on = asyncio.get_running_loop().create_task(client.come_back(two))
        await until(lambda: cluster.gateways[0].counters["streams_expired"] == 1, GRACE_S + 2.0)
        cluster.gateways[0].bus.mend()
        await until(lambda: cluster.decodes[0].counters["cancels_stale"] > 0, 4.0)
        await going_on
        await check_undisturbed(cluster, client)
        await cluster.settle(within_s=2 * GRACE_S)

    run_with(scenario, **SLOW)


def run_with_three(scenario: Any, **more: Any) -> None:
    async def main() -> None:
        async with Cluster(gateways=3, prefills=1, decodes=1, **(SLOW | more)) as cluster:
            await scenario(cluster, *[await streams_of(gateway) for gateway in cluster.gateways])

    run_virtual(main())


@pytest.mark.parametrize("heard", [False, True], ids=["before it could ask", "after it was heard"])
def test_who_loses_the_stream_while_taking_it_up_leaves_the_ticket_alone(heard: bool) -> None:
    """The second gateway has not heard of the worker yet, or not its answer. The third is slow, so that a roll call
    comes between the two."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams, three: Streams) -> None:
        second, third = Client(), Client()
        await third.read(await one.open(plan_for(**LONG), KEY, 0), leave_at=5)
        (ticket,) = cluster.decodes[0].desk.tickets
        second.id = third.id
        if not heard:
            cluster.gateways[1].registry.find = lambda peer: None  # type: ignore[method-assign, assignment]
        taking = asyncio.get_running_loop().create_task(second.come_back(two))
        await until(lambda: cluster.gateways[1].counters["streams_taken_up"] == 1, 2.0)
        await asyncio.sleep(0.2)
        assert (ticket.order.gateway == cluster.gateways[1].peer) == heard
        take_up = three._take_up

        async def slowly(*args: Any) -> Any:
            await asyncio.sleep(1.5 * EVERY_S)
            return await take_up(*args)

        three._take_up = slowly  # type: ignore[method-assign]
        await third.come_back(three)
        await taking
        assert isinstance(second.error, StreamMoved)
        assert cluster.gateways[2].counters["tickets_adopted"] == 1
        await check_undisturbed(cluster, third)
        await cluster.settle(within_s=2 * GRACE_S)

    def policy(envelope: Envelope) -> Sequence[float]:
        is_held = envelope.kind == "reply" and verb_of(envelope) == REPLAY and envelope.receiver == "gateway-1"
        return (5.0,) if is_held and heard else (0.0,)

    run_with_three(scenario, policy=policy)


def test_a_late_replay_of_an_earlier_owner_does_not_take_the_ticket_back() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams, three: Streams) -> None:
        client = Client()
        await client.read(await one.open(plan_for(**LONG), KEY, 0), leave_at=5)
        await client.come_back(two, leave_at=20)
        await client.come_back(three, leave_at=30)
        (ticket,) = cluster.decodes[0].desk.tickets
        owner = cluster.gateways[2].peer
        assert (ticket.order.gateway, cluster.decodes[0].counters["replays_stale"]) == (owner, 0)
        await until(lambda: cluster.decodes[0].counters["replays_stale"] == 1, 5.0)
        assert ticket.order.gateway == owner
        await client.come_back(three)
        await check_undisturbed(cluster, client)
        await cluster.settle(within_s=2 * GRACE_S)

    def policy(envelope: Envelope) -> Sequence[float]:
        is_taken = verb_of(envelope) == REPLAY and envelope.kind == "request" and envelope.sender == "gateway-1"
        return (0.0, 4.0) if is_taken else (0.0,)

    run_with_three(scenario, policy=policy)


def test_an_owner_that_has_the_stream_again_is_not_undone_by_what_it_said_before() -> None:
    """The name alone would not tell its words from before and after."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client, worker = Client(), cluster.decodes[0]
        await client.read(await one.open(plan_for(**LONG), KEY, 0), leave_at=5)
        (ticket,) = worker.desk.tickets
        epochs = [ticket.epoch]
        for streams in (two, one):
            await client.come_back(streams, leave_at=client.has[0] + 10)
            epochs.append(ticket.epoch)
        assert ticket.order.gateway == cluster.gateways[0].peer
        assert epochs == sorted(set(epochs))
        for number, epoch in enumerate(epochs[:-1]):
            order = Cancel(room=ticket.key.room, generation=1, reason="late", epoch=epoch)
            assert (await worker.desk.on_cancel(order)).ok
            assert (await worker.desk.on_cancel(order.model_copy(update={"choice": 0}))).ok
            assert worker.counters["cancels_stale"] == 2 * (number + 1)
        assert not ticket.choices[0].done
        await client.come_back(one)
        await check_undisturbed(cluster, client)
        await cluster.settle()

    run_with(scenario, **SLOW)


def test_an_owner_that_cannot_take_the_ticket_up_ends_it() -> None:
    """Though the worker has never heard that it is the owner."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client, worker = Client(), cluster.decodes[0]
        await client.read(await one.open(plan_for(**LONG), KEY, 0), leave_at=5)
        cluster.gateways[0].kill_now()
        died_at = now()
        going_on = asyncio.get_running_loop().create_task(client.come_back(two))
        await until(lambda: worker.counters["tickets_cancelled"] == 1, GRACE_S)
        assert now() - died_at < GRACE_S - 0.5, "its own grace was over"
        await going_on
        assert client.tokens == await oracle(PROMPT, **LONG)
        assert (client.timings["recoveries"], cluster.gateways[1].counters["tickets_not_adopted"]) == (1, 1)
        await cluster.settle(within_s=2 * GRACE_S)

    def policy(envelope: Envelope) -> Sequence[float]:
        is_replay = verb_of(envelope) == REPLAY and envelope.kind == "request"
        return () if is_replay and decode(Replay, envelope.data).gateway is not None else (0.0,)

    run_with(scenario, policy=policy, **SLOW)


def test_roll_calls_do_not_end_a_ticket_that_was_left_for_the_next_gateway() -> None:
    """Its gateway was told to end, and answers the roll for a while."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client()
        await client.read(await one.open(plan_for(**LONG), KEY, 0), leave_at=5)
        await one.stop()
        calls = cluster.gateways[0].counters["received_roll_call"]
        await until(lambda: cluster.gateways[0].counters["received_roll_call"] >= calls + 2, 3 * EVERY_S)
        cluster.gateways[0].kill_now()
        await client.come_back(two)
        assert cluster.decodes[0].counters["cancels_missed"] == 0
        await check_undisturbed(cluster, client)
        await cluster.settle()

    run_with(scenario, **SLOW)


@pytest.mark.parametrize("then", ["stays", "dies"])
def test_a_ticket_that_was_left_and_is_not_taken_up_ends(then: str) -> None:
    """By the roll call of the gateway that left it, or by the worker's own grace."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client, worker = Client(), cluster.decodes[0]
        await client.read(await one.open(plan_for(**MANY | {"max_tokens": 900}), KEY, 0), leave_at=5)
        await one.stop()
        left_at = now()
        if then == "dies":
            cluster.gateways.pop(0).kill_now()
        await until(lambda: not len(worker.desk), 2 * GRACE_S)
        assert GRACE_S <= now() - left_at < GRACE_S + 8.0
        assert ended(worker) == {"stays": "tickets_cancelled", "dies": "tickets_peer_lost"}[then]
        await cluster.settle()

    run_with(scenario, step_s=STEP_S, num_pages=1024)


def ended(worker: Worker) -> str:
    (name,) = (name for name in worker.counters.as_dict() if name in ("tickets_cancelled", "tickets_peer_lost"))
    return name


def test_who_gives_up_a_ticket_that_nobody_else_has_is_heard() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client, worker = Client(), cluster.decodes[0]
        await client.read(await one.open(plan_for(**MANY | {"max_tokens": 900}), KEY, 0), leave_at=5)
        await client.come_back(two, leave_at=20)
        left_at = now()
        await until(lambda: cluster.gateways[1].counters["streams_expired"] == 1, GRACE_S + 2.0)
        await until(lambda: not len(worker.desk), 0.5)
        assert now() - left_at < GRACE_S + 2.0
        assert worker.counters["cancels_stale"] == worker.counters["cancels_missed"] == 0
        await cluster.settle()

    told: list[Envelope] = []

    def policy(envelope: Envelope) -> Sequence[float]:
        if verb_of(envelope) == CANCEL and envelope.kind == "request":
            told.append(envelope)
        return (0.0,)

    run_with(scenario, step_s=STEP_S, num_pages=1024, policy=policy)
    assert {decode(Cancel, one.data).epoch > 0 for one in told} == {True}
