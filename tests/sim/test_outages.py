"""NATS is away for a while: nobody is heard, which says nothing about anybody."""

import asyncio
from typing import Any

import pytest

from shared.bus.memory import Envelope
from tests.sim.cluster import Answer, Cluster, prompt_of
from tests.sim.virtual_time import run_virtual

NUM_REQUESTS = 4


async def cut_at(cluster: Cluster, verb: str, outage_s: float) -> list[Answer]:
    """Every connection is cut as the first message of that kind is on its way, which is lost."""
    hit = asyncio.Event()

    def lose(envelope: Envelope) -> tuple[float, ...]:
        if envelope.kind != "request" or not envelope.subject.endswith(f".{verb}"):
            return (0.0,)
        hit.set()
        return ()

    cluster.hub.policy = lose
    loop = asyncio.get_running_loop()
    sampling: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "timeout_s": 120.0}
    asked = [loop.create_task(cluster.ask(prompt_of(30, seed=k), **sampling)) for k in range(NUM_REQUESTS)]
    await hit.wait()
    await asyncio.sleep(0.05)
    for process in cluster.processes:
        process.bus.cut()
    cluster.hub.policy = lambda _: (0.0,)
    await asyncio.sleep(outage_s)
    for process in cluster.processes:
        process.bus.mend()
    return [await task for task in asked]


@pytest.mark.parametrize("outage_s", [3.0, 11.0, 13.0, 20.0, 33.0])
@pytest.mark.parametrize("verb", ["destination", "commit"])
def test_an_outage_of_nats_costs_no_request_and_blames_nobody(verb: str, outage_s: float) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(300), Cluster(prefills=2, decodes=2) as cluster:
            answers = await cut_at(cluster, verb, outage_s)
            assert [answer.error for answer in answers] == [None] * NUM_REQUESTS
            assert [answer.timings["attempts"] for answer in answers] == [1] * NUM_REQUESTS
            assert len(cluster.gateway.rooms.breakers) == 0
            await cluster.settle()

    run_virtual(scenario())
