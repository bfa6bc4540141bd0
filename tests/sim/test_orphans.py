"""Destinations of rooms that nobody has heard of are held for a moment, and never hold up the others."""

import asyncio

import pytest

from shared.protocol import subjects
from shared.protocol.messages import Destination
from shared.protocol.wire import encode
from shared.runtime.ids import new_room
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.virtual_time import run_virtual

PER_TURN, TURN_S = 200, 0.05


@pytest.mark.parametrize("rooms", ["many rooms", "one room"])
def test_a_flood_of_orphans_does_not_stop_a_prefill_worker(rooms: str) -> None:
    async def flood(cluster: Cluster) -> None:
        p, d = cluster.prefills[0], cluster.decodes[0]
        where, stranger = subjects.subject("prefill", p.peer, subjects.DESTINATION), cluster.hub.client("stranger")
        room = new_room()
        while True:
            for _ in range(PER_TURN):
                orphan = Destination(
                    room=room if rooms == "one room" else new_room(),
                    generation=1,
                    decode=d.peer,
                    identity=d.engine.identity,
                    geometry=d.engine.geometry,
                    link=d.link.address,
                    secret=bytes(32),
                )
                await stranger.publish(where, encode(orphan))
            await asyncio.sleep(TURN_S)

    async def scenario() -> None:
        async with asyncio.timeout(120), Cluster() as cluster:
            flooding = asyncio.get_running_loop().create_task(flood(cluster))
            await asyncio.sleep(0.5)
            answer = await cluster.ask(prompt_of(9), max_tokens=4, ignore_eos=True, timeout_s=60)
            flooding.cancel()
            assert answer.error is None
            assert answer.timings["attempts"] == 1
            assert cluster.prefills[0].bus.stats.dropped == 0
            await asyncio.sleep(1.0)
            await cluster.settle()

    run_virtual(scenario())
