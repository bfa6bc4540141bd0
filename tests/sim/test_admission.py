"""Room is scarce: small requests do not wait behind a big one for ever, and a big one is not starved by them, with one
gateway and with two that know nothing of each other. Nothing is held while waiting, and nothing deadlocks."""

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from services.gateway.generation import GenerationRequest
from services.gateway.line import LineSettings
from shared.engine.settings import EngineSettings
from shared.machines.decode import DecodeState
from shared.protocol.messages import SamplingSpec
from shared.runtime.errors import BatonError
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.processes import Gateway
from tests.sim.virtual_time import run_virtual

PATIENCE_S = LineSettings().patience_s


@dataclass
class Client:
    """What became of a request."""

    began_at: float
    first_at: float | None = None
    ended_at: float | None = None
    tokens: list[int] = field(default_factory=list)
    error: BatonError | None = None


async def send(gateway: Gateway, name: str, prompt_len: int, max_tokens: int, client: Client) -> None:
    sampling = SamplingSpec(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    flow = gateway.flow.generate(GenerationRequest(name, prompt_of(prompt_len), sampling, timeout_s=120.0))
    now = asyncio.get_running_loop().time
    try:
        async for batch in flow:
            client.first_at = client.first_at or now()
            client.tokens += [event.token for event in batch]
    except BatonError as error:
        client.error = error
    finally:
        client.ended_at = now()
        await flow.aclose()


class Stream:
    """Small requests that keep a worker full: as soon as one ends the next comes."""

    def __init__(self, gateway: Gateway, width: int, prompt_len: int = 20, max_tokens: int = 20) -> None:
        self.clients: list[Client] = []
        self._gateway, self._shape = gateway, (prompt_len, max_tokens)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run(i)) for i in range(width)]

    async def _run(self, lane: int) -> None:
        while True:
            client = Client(asyncio.get_running_loop().time())
            self.clients.append(client)
            await send(self._gateway, f"small-{self._gateway.name}-{lane}-{len(self.clients)}", *self._shape, client)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def started_between(self, start: float, end: float) -> int:
        return sum(c.began_at > start and c.first_at is not None and c.first_at < end for c in self.clients)


@pytest.mark.parametrize("gateways", [1, 2])
@pytest.mark.parametrize("scarce", ["decode", "prefill"])
def test_a_big_request_gets_in_and_small_ones_pass_it_before(gateways: int, scarce: str) -> None:
    async def scenario() -> None:
        # Small ones want 5 pages of P and 7 of D; the big one 40 of P and 42 of D, out of 48.
        async with Cluster(gateways=gateways, num_pages=48, max_running=32, step_s=0.02) as cluster:
            short = {"prompt_len": 20, "max_tokens": 2} if scarce == "prefill" else {}
            streams = [Stream(gateway, 8 // gateways, **short) for gateway in cluster.gateways]
            await asyncio.sleep(3.0)
            big = Client(asyncio.get_running_loop().time())
            await send(cluster.gateway, "big", 160, 8, big)
            for stream in streams:
                await stream.stop()
            assert big.error is None
            assert len(big.tokens) == 8
            assert big.first_at is not None
            assert big.first_at - big.began_at < PATIENCE_S + 4.0
            passed = sum(s.started_between(big.began_at, big.first_at) for s in streams)
            assert passed > 3, "they do not wait behind it from the first moment on"
            assert all(c.error is None for s in streams for c in s.clients)
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(6))
def test_many_of_all_sizes_from_two_gateways_all_get_in(seed: int) -> None:
    """Each needs up to the whole of P and of D; those that hold one never wait for the other."""

    async def scenario() -> None:
        rng = random.Random(seed)
        async with Cluster(gateways=2, prefills=2, decodes=2, num_pages=40, max_running=32) as cluster:
            now = asyncio.get_running_loop().time()
            clients = [Client(now) for _ in range(24)]
            shapes = [(rng.choice([5, 20, 60, 120, 140]), rng.randint(1, 16)) for _ in clients]
            async with asyncio.TaskGroup() as group:
                for number, (client, shape) in enumerate(zip(clients, shapes, strict=True)):
                    gateway = cluster.gateways[number % 2]
                    group.create_task(send(gateway, f"r-{number}", *shape, client))
                    await asyncio.sleep(rng.choice([0.0, 0.0, 0.05]))
            assert [c.error for c in clients] == [None] * len(clients)
            assert [len(c.tokens) for c in clients] == [tokens for _, tokens in shapes]
            await cluster.settle()

    run_virtual(scenario())


def test_two_big_ones_at_the_same_moment_never_keep_what_the_other_needs() -> None:
    """Each gateway asks for all of P and D at once, again and again."""

    async def scenario() -> None:
        async with Cluster(gateways=2, num_pages=44, step_s=0.02) as cluster:
            for turn in range(5):
                clients = [Client(0.0) for _ in range(4)]
                async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                    for number, client in enumerate(clients):
                        gateway = cluster.gateways[number % 2]
                        group.create_task(send(gateway, f"big-{turn}-{number}", 150, 8, client))
                assert [c.error for c in clients] == [None] * 4
            await cluster.settle()

    run_virtual(scenario())


class SmallPrefill(Cluster):
    """P has room for four prompts of 40 tokens, D for all of them."""

    def engine_settings(self, role: str) -> EngineSettings:
        return replace(super().engine_settings(role), num_pages=40 if role == "prefill" else 400)


@pytest.mark.parametrize("gateways", [1, 2])
def test_reservations_on_decode_never_exceed_the_credits_of_prefill(gateways: int) -> None:
    """D holds pages for no more prompts than P has said yes to. Two gateways may both see the last credit: then P says
    no to one, and what it has reserved is given back at once."""

    async def scenario() -> None:
        async with SmallPrefill(gateways=gateways, max_running=64, step_s=0.02) as cluster:
            decode, loop = cluster.decodes[0], asyncio.get_running_loop()
            clients = [Client(0.0) for _ in range(24)]
            tasks = [
                loop.create_task(send(cluster.gateways[i % gateways], f"r-{i}", 40, 4, client))
                for i, client in enumerate(clients)
            ]
            waiting_s = 0.0
            while not all(task.done() for task in tasks):
                states = decode.desk.tickets.states()
                reserved = states.get(DecodeState.RESERVED.value, 0) + states.get(DecodeState.FILLING.value, 0)
                assert reserved <= 4 * gateways
                waiting_s = waiting_s + 0.001 if reserved > 4 else 0.0
                assert waiting_s < 0.05
                await asyncio.sleep(0.001)
            assert [c.error for c in clients] == [None] * len(clients)
            await cluster.settle()

    run_virtual(scenario())


def test_what_gave_way_comes_before_what_is_new() -> None:
    """While D has preempted requests it admits nobody, so that they come back; and then everybody is served."""

    async def scenario() -> None:
        async with Cluster(gateways=2, num_pages=24, growth_tokens=1, max_running=8) as cluster:
            decode = cluster.decodes[0]
            reserve = decode.engine.reserve

            def watched(*args: Any, **kwargs: Any) -> None:
                is_preempted = bool(decode.engine.queues()["preempted"])
                reserve(*args, **kwargs)
                assert not is_preempted

            decode.engine.reserve = watched  # type: ignore[method-assign]
            clients = [Client(0.0) for _ in range(16)]
            async with asyncio.TaskGroup() as group:
                for number, client in enumerate(clients):
                    group.create_task(send(cluster.gateways[number % 2], f"r-{number}", 12, 40, client))
            assert [c.error for c in clients] == [None] * len(clients)
            assert decode.engine.stats.preemptions > 0
            await cluster.settle()

    run_virtual(scenario())
