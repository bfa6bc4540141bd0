"""Optimistic prefill: P computes while it does not know yet where the state goes, and sends nothing before it does."""

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from shared.bus.memory import Envelope
from shared.protocol import subjects
from shared.protocol.messages import Destination
from shared.protocol.wire import decode
from shared.runtime.errors import DeadlineExceeded
from shared.transfer.fake import Mishap
from tests.sim.cluster import Answer, Cluster, prompt_of
from tests.sim.test_flows import oracle, oracles
from tests.sim.virtual_time import run_virtual

PLENTY = 1 << 20
SAMPLING = {"max_tokens": 10, "ignore_eos": True, "temperature": 0.7, "seed": 11, "n": 2}


def destinations(fate: Callable[[Envelope], Iterable[float]]) -> Callable[[Envelope], Iterable[float]]:
    """Only what D says of where the state goes is touched."""

    def policy(envelope: Envelope) -> Iterable[float]:
        is_one = envelope.subject.endswith(f".{subjects.DESTINATION}") and envelope.kind == "request"
        return fate(envelope) if is_one else (0.0,)

    return policy


def late_by(seconds: float) -> Callable[[Envelope], Iterable[float]]:
    return destinations(lambda envelope: (seconds,))


def slow_for(cluster: Cluster, first_s: float, others_s: float) -> None:
    """For so long the first request's destinations are lost, and for so long the others'."""
    rooms: dict[int, float] = {}

    def fate(envelope: Envelope) -> Iterable[float]:
        room, now = decode(Destination, envelope.data).room, asyncio.get_running_loop().time()
        begun_at = rooms.setdefault(room, now)
        return () if now - begun_at < (first_s if room == next(iter(rooms)) else others_s) else (0.0,)

    cluster.hub.policy = lambda envelope: tuple(destinations(fate)(envelope))


class Sent:
    """When bytes and tokens left P."""

    def __init__(self, cluster: Cluster) -> None:
        self.bytes_at: list[float] = []
        self.tokens_at: list[float] = []
        before = cluster.hub.policy

        def look(envelope: Envelope) -> Iterable[float]:
            if envelope.sender.startswith("prefill") and envelope.subject.endswith(f".{subjects.TOKENS}"):
                self.tokens_at.append(asyncio.get_running_loop().time())
            return before(envelope)

        def transfer(key: object, pieces: object) -> Mishap:
            self.bytes_at.append(asyncio.get_running_loop().time())
            return Mishap()

        cluster.hub.policy = lambda envelope: tuple(look(envelope))
        cluster.network.policy = transfer


def asking(cluster: Cluster, prompt: tuple[int, ...], **options: Any) -> "asyncio.Task[Answer]":
    return asyncio.get_running_loop().create_task(cluster.ask(prompt, **SAMPLING | options))


async def until_state(cluster: Cluster, state: str, count: int = 1, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while cluster.prefills[0].desk.tickets.states().get(state) != count:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("length", [5, 16, 40])
def test_it_computes_at_once_is_parked_and_sends_nothing_before_the_destination_is_there(length: int) -> None:
    async def scenario() -> None:
        prompt = prompt_of(length)
        async with Cluster(optimistic_attempts=1, policy=late_by(0.4)) as cluster:
            sent, prefill = Sent(cluster), cluster.prefills[0]
            began = asyncio.get_running_loop().time()
            task = asking(cluster, prompt)
            await until_state(cluster, "parked")
            assert asyncio.get_running_loop().time() - began < 0.2
            assert prefill.engine.stats.prompt_tokens_computed == length
            assert (sent.bytes_at, sent.tokens_at) == ([], [])
            answer = await task
            assert (answer.error, answer.path) == (None, "remote")
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            assert min(*sent.bytes_at, *sent.tokens_at) - began >= 0.4
            assert prefill.engine.stats.prompt_tokens_computed == length
            assert prefill.engine.stats.tokens_generated == 2
            await cluster.settle()

    run_virtual(scenario())


def test_a_destination_in_the_middle_of_the_prompt_lets_the_rest_go_out_as_ever() -> None:
    async def scenario() -> None:
        prompt = prompt_of(100)
        async with Cluster(optimistic_attempts=1, policy=late_by(0.05)) as cluster:
            sent = Sent(cluster)
            answer = await asking(cluster, prompt)
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            assert len(sent.bytes_at) > 3
            assert cluster.prefills[0].engine.stats.prompt_tokens_computed == 100
            await cluster.settle()

    run_virtual(scenario())


def test_without_attempts_nothing_is_computed_before_the_destination_is_there() -> None:
    async def scenario() -> None:
        async with Cluster(policy=late_by(0.4)) as cluster:
            task = asking(cluster, prompt_of(20))
            await until_state(cluster, "waiting")
            await asyncio.sleep(0.35)
            assert cluster.prefills[0].engine.stats.steps == 0
            assert (await task).error is None

    run_virtual(scenario())


@pytest.mark.parametrize("stash_bytes", [0, 600, PLENTY], ids=["recompute", "small stash", "stash"])
@pytest.mark.parametrize("attempts", [1, 3])
def test_more_parked_prompts_than_pages_yield_to_each_other_and_all_are_answered(
    attempts: int, stash_bytes: int
) -> None:
    async def scenario() -> None:
        prompts = [prompt_of(20 + 4 * i, seed=i) for i in range(8)]
        options: dict[str, Any] = {"optimistic_attempts": attempts, "stash_bytes": stash_bytes, "decodes": 3}
        async with Cluster(num_pages=32, policy=late_by(0.3), **options) as cluster:
            answers = await asyncio.gather(*(asking(cluster, prompt) for prompt in prompts))
            assert [a.error for a in answers] == [None] * 8
            assert {a.path for a in answers} == {"remote"}
            assert [a.tokens for a in answers] == await oracles(prompts, **SAMPLING)
            stats = cluster.prefills[0].engine.stats
            assert 0 < stats.preemptions <= 8 * attempts
            lengths = sum(map(len, prompts))
            assert stats.prompt_tokens_computed == lengths + stats.tokens_dropped
            if stash_bytes == PLENTY:
                assert stats.tokens_dropped == 0
            assert stats.tokens_generated == 16
            await cluster.settle()

    run_virtual(scenario())


def test_one_whose_destination_comes_drives_out_those_that_are_parked() -> None:
    """The first is away when its destination comes; the others still wait for theirs, for long."""

    async def scenario() -> None:
        prompts = [prompt_of(36, seed=i) for i in range(3)]
        options: dict[str, Any] = {"optimistic_attempts": 2, "stash_bytes": PLENTY, "decodes": 3}
        async with Cluster(num_pages=20, **options) as cluster:
            slow_for(cluster, 0.5, 3.0)
            first = asking(cluster, prompts[0])
            await until_state(cluster, "parked")
            others = [asking(cluster, prompt) for prompt in prompts[1:]]
            await until_state(cluster, "yielded")
            assert (await first).error is None
            assert asyncio.get_running_loop().time() < 1.5
            answers = [await first, *[await other for other in others]]
            assert [a.tokens for a in answers] == await oracles(prompts, **SAMPLING)
            assert cluster.prefills[0].engine.stats.tokens_dropped == 0
            await cluster.settle()

    run_virtual(scenario())


STATES = ("ahead", "parked", "yielded", "returning")


async def bring_to(cluster: Cluster, state: str) -> tuple["asyncio.Task[Answer]", list["asyncio.Task[Answer]"]]:
    """A request whose ticket is in `state` on P, and others that are there only to bring that about."""
    loop = asyncio.get_running_loop()
    if state in ("ahead", "parked"):
        task = asking(cluster, prompt_of(60), timeout_s=0.35 + loop.time() % 0.001)
        await until_state(cluster, state)
        return task, []
    task = asking(cluster, prompt_of(60), timeout_s=0.9)
    await until_state(cluster, "parked")
    other = loop.create_task(cluster.ask(prompt_of(60, seed=1), **SAMPLING | {"max_tokens": 2}))
    await until_state(cluster, "yielded")
    if state == "returning":
        await until_state(cluster, "returning")
    return task, [other]


@pytest.mark.parametrize("stash_bytes", [0, PLENTY], ids=["recompute", "stash"])
@pytest.mark.parametrize("end", ["client leaves", "deadline"])
@pytest.mark.parametrize("state", STATES)
def test_it_can_end_in_every_state_and_leaves_nothing(state: str, end: str, stash_bytes: int) -> None:
    async def scenario() -> None:
        options: dict[str, Any] = {"optimistic_attempts": 1, "stash_bytes": stash_bytes, "decodes": 2}
        async with Cluster(num_pages=24, step_s=0.02, **options) as cluster:
            prefill = cluster.prefills[0]
            # The second one's destination is there at once, and its bytes take long: the first has to wait for pages.
            slow_for(cluster, 0.4 if state == "returning" else 30.0, 0.0)
            cluster.network.policy = lambda key, pieces: Mishap(delay_s=0.4)
            task, others = await bring_to(cluster, state)
            assert prefill.desk.tickets.states()[state] == 1
            if end == "client leaves":
                began = asyncio.get_running_loop().time()
                task.cancel()
                await asyncio.wait({task})
                async with asyncio.timeout(0.1):
                    while state in prefill.desk.tickets.states() or prefill.desk.tickets.states().get("releasing"):
                        await asyncio.sleep(0.001)
                assert asyncio.get_running_loop().time() - began <= 0.05
            else:
                answer = await task
                assert isinstance(answer.error, DeadlineExceeded)
            await asyncio.sleep(0.05)
            assert prefill.engine.stashed_bytes == 0
            for other in others:
                answer = await other
                assert (answer.error, answer.tokens) == (
                    None,
                    await oracle(prompt_of(60, seed=1), **SAMPLING | {"max_tokens": 2}),
                )
            await cluster.settle(1.0)

    run_virtual(scenario())


@pytest.mark.parametrize("attempts", [0, 1])
def test_a_destination_that_never_comes_is_asked_for_and_given_up(attempts: int) -> None:
    """D lives and does not know the ticket: P lets it go long before the request's deadline."""

    async def scenario() -> None:
        async with Cluster(optimistic_attempts=attempts) as cluster:
            prefill = cluster.prefills[0]
            heard = (subjects.RESERVE, subjects.PREFILL, subjects.REPLAY, subjects.HEARTBEAT)
            cluster.hub.policy = lambda envelope: (0.0,) if envelope.subject.endswith(heard) else ()
            task = asking(cluster, prompt_of(20), timeout_s=300)
            await until_state(cluster, "parked" if attempts else "waiting")
            [ticket] = prefill.desk.tickets
            await asyncio.sleep(10)
            assert ticket.state.cause is None  # D still holds it, so P does too
            for theirs in cluster.decodes[0].desk.tickets:
                theirs.end("engine_error", "gone", by="decode")
            async with asyncio.timeout(15):
                while ticket.state.cause is None:
                    await asyncio.sleep(0.01)
            assert (ticket.state.cause.code, ticket.state.cause.by) == ("unknown_room", "decode")
            task.cancel()
            await asyncio.wait({task})

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_network_and_too_few_pages_lose_nothing(seed: int) -> None:
    """A tenth of the messages are lost, a tenth come twice, destinations are slow, and everybody drives out everybody:
    on P those that are parked, on D the youngest."""

    async def scenario() -> None:
        dice = random.Random(seed)

        def policy(envelope: Envelope) -> Iterable[float]:
            if envelope.subject.endswith(f".{subjects.HEARTBEAT}"):
                return (0.0,)
            chance = dice.random()
            copies = 0 if chance < 0.1 else 2 if chance < 0.2 else 1
            slow = 0.2 if envelope.subject.endswith(f".{subjects.DESTINATION}") else 0.03
            return tuple(dice.uniform(0.0, slow) for _ in range(copies))

        prompts = [prompt_of(dice.randrange(1, 50), seed=seed * 100 + i) for i in range(14)]
        options: dict[str, Any] = {
            "optimistic_attempts": dice.choice([1, 2]),
            "stash_bytes": dice.choice([0, 3000, PLENTY]),
            "growth_tokens": 2,
            "num_pages": 26,
        }
        sampling = SAMPLING | {"max_tokens": 24}
        async with Cluster(prefills=2, decodes=2, policy=policy, **options) as cluster:
            answers = await asyncio.gather(*(cluster.ask(p, timeout_s=120, **sampling) for p in prompts))
            assert [a.error for a in answers] == [None] * len(prompts)
            assert [a.tokens for a in answers] == await oracles(prompts, **sampling)
            await cluster.settle()

    run_virtual(scenario())


def test_a_destination_that_comes_together_with_the_prompt_is_used_at_once() -> None:
    """NATS does not order gateway and D; the ticket's coroutine has not begun when D's word is there."""

    def policy(envelope: Envelope) -> Iterable[float]:
        together = envelope.kind == "request" and envelope.subject.endswith(
            (f".{subjects.PREFILL}", f".{subjects.DESTINATION}")
        )
        return (0.1 - asyncio.get_running_loop().time() % 0.1 if together else 0.0,)

    async def scenario() -> None:
        prompts = [prompt_of(30 + i, seed=i) for i in range(4)]
        async with Cluster(optimistic_attempts=1) as cluster:
            cluster.hub.policy = policy
            answers = await asyncio.gather(*(cluster.ask(prompt, **SAMPLING) for prompt in prompts))
            assert [answer.error for answer in answers] == [None] * 4
            assert [answer.tokens for answer in answers] == await oracles(prompts, **SAMPLING)
            await cluster.settle()

    run_virtual(scenario())
