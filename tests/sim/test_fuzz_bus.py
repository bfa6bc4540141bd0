"""Messages that nobody should send, at a whole simulated cluster that serves requests meanwhile: they are counted, they
never raise, and what is not forged changes no answer. HYPOTHESIS_PROFILE=deep sends thirty times as many.
"""

import asyncio
import copy
import json
import os
import random
from collections.abc import Iterable
from typing import Any

from shared.bus.base import Message
from shared.bus.memory import Envelope, MemoryBus
from shared.protocol import subjects
from shared.protocol.wire import encode
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.test_flows import oracles
from tests.sim.virtual_time import run_virtual
from tests.support_noise import LISTENERS, Noise, Target

COUNT = 60_000 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 2000
SPOILED = 0.2
"""Of the messages about live tickets: so few that some requests are still answered."""
SAMPLING = {"max_tokens": 10, "ignore_eos": True, "temperature": 0.7, "seed": 11}
ODD: list[Any] = [None, True, 0, -1, 1, 7, 1 << 31, 1 << 63, 10**30, 1.5, -1e300, "", "x", "x" * 3000, "é\u0000"]
ODD += [[], {}, [0], [[0, 0]] * 200, {"a": 1}, "AAAA", "AQAAAA==", ["stop"], "stop", "finished", "accepted"]


def target_of(cluster: Cluster) -> Target:
    decode = cluster.decodes[0]
    processes = {"gateway": cluster.gateway, "prefill": cluster.prefills[0], "decode": decode}
    return Target(
        {role: process.peer for role, process in processes.items()}, decode.engine.identity, decode.engine.geometry
    )


def handler_errors(cluster: Cluster) -> dict[str, int]:
    return {process.name: process.bus.stats.handler_errors for process in cluster.processes}


def test_noise_is_counted_and_changes_nothing() -> None:
    async def scenario() -> None:
        prompts = [prompt_of(1 + 3 * k, seed=k) for k in range(8)]
        expected = await oracles(prompts, **SAMPLING)
        async with Cluster() as cluster:
            noise = Noise(target_of(cluster), seed=4)
            bus: MemoryBus = cluster.hub.client("intruder")

            async def overhear(message: Message) -> None:
                noise.overhear(message.subject, message.data, message.reply)

            await bus.subscribe("baton.v1.>", overhear)
            assert (await cluster.ask(prompts[0], **SAMPLING)).error is None
            messages = noise.everything()

            async def send() -> None:
                for number in range(COUNT):
                    subject, data, _ = next(messages)
                    await bus.publish(subject, data)
                    if number % 20 == 19:
                        await asyncio.sleep(0.005)

            sending = asyncio.get_running_loop().create_task(send())
            while not sending.done():
                answers = await asyncio.gather(*(cluster.ask(prompt, **SAMPLING) for prompt in prompts))
                assert [answer.error for answer in answers] == [None] * len(prompts)
                assert [answer.tokens for answer in answers] == expected
            await sending
            await cluster.settle()
            by_role = {process.role: process.counters for process in cluster.processes}
            for (role, name), least in noise.expected.items():
                if role == "*" or name == "malformed_heartbeat":
                    continue  # the twin carries no answers that nobody waits for
                found = by_role[role][name]
                assert found == least if name.startswith("malformed_") else found >= least, (role, name, found, least)
            assert set(handler_errors(cluster).values()) == {0}
            assert len(noise.sorts) >= 8

    run_virtual(scenario())


def places_of(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    found = []
    for key, value in pairs:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places_of(value, (*path, key))
    return found


def forged(rng: random.Random, data: bytes) -> bytes:
    """A real message with something else in one or two places, but for whom it is about."""
    document = json.loads(data)
    for _ in range(rng.choice([1, 1, 2])):
        path = rng.choice([place for place in places_of(document) if place[-1] not in ("room", "generation", "kind")])
        holder = document
        for key in path[:-1]:
            holder = holder[key] if isinstance(holder, dict | list) else {}
        if not isinstance(holder, dict | list):
            continue
        if rng.random() < 0.15 and isinstance(holder, list):
            holder.append(holder[0] if holder else 0)
        elif isinstance(holder, dict) or path[-1] < len(holder):
            holder[path[-1]] = copy.deepcopy(rng.choice(ODD))
    return json.dumps(document).encode()


def test_forged_messages_of_live_tickets_end_them_at_worst() -> None:
    """A peer gone mad says wrong things about live tickets, under their own names, and is quicker than the right ones.
    Requests may fail; no handler and no coroutine does, nobody hangs, and nothing is left behind."""
    rng = random.Random(8)

    def policy(envelope: Envelope) -> Iterable[float]:
        return (0.0,) if "intruder" in (envelope.sender, envelope.receiver) else (0.01,)

    async def scenario() -> None:
        async with Cluster(num_pages=96, policy=policy) as cluster:
            noise = Noise(target_of(cluster), seed=8)
            bus: MemoryBus = cluster.hub.client("intruder")
            said: set[tuple[str, bytes]] = set()
            count = 0

            async def spoil(message: Message) -> None:
                nonlocal count
                verb = message.subject.rpartition(".")[2]
                if verb in (subjects.HEARTBEAT, "hello") or (message.subject, message.data) in said:
                    return
                wrong = [(message.subject, message.data)] * 2
                document = json.loads(message.data)
                if "room" in document:
                    role, verb = rng.choice([(role, verb) for role in LISTENERS for verb in LISTENERS[role]])
                    other = noise.make(verb, document["room"], document["generation"], noise.target.identity)
                    wrong.append((noise.to(role, verb), encode(other)))
                for subject, data in wrong:
                    if rng.random() < SPOILED:
                        data = forged(rng, data)
                        said.add((subject, data))
                        await bus.publish(subject, data)
                        count += 1

            await bus.subscribe("baton.v1.>", spoil)
            ended = []
            while count < COUNT // 4:
                prompts = [prompt_of(rng.randrange(1, 30), seed=count + k) for k in range(6)]
                answers = await asyncio.gather(*(cluster.ask(p, timeout_s=20, **SAMPLING) for p in prompts))
                ended += [answer.error for answer in answers]
            await bus.close()
            await cluster.settle(within_s=40.0)
            assert set(handler_errors(cluster).values()) == {0}
            assert None in ended
            answer = await cluster.ask(prompt_of(9), **SAMPLING)
            assert [answer.tokens] == await oracles([prompt_of(9)], **SAMPLING)

    run_virtual(scenario())
