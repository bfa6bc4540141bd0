"""Messages get lost, come twice, late and out of order; processes die. What the client gets is right or a typed error,
and nothing is left behind."""

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from shared.bus.memory import Envelope
from shared.protocol import subjects
from shared.runtime.errors import BatonError, Corrupt, PeerLost, TransferRefused
from shared.transfer.fake import Mishap
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.test_flows import oracle, oracles
from tests.sim.virtual_time import run_virtual

SAMPLING = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.7, "seed": 11}
VERBS = [v for v in subjects.VERBS if v != subjects.HEARTBEAT]


def verb_of(envelope: Envelope) -> str:
    return envelope.subject.rsplit(".", 1)[-1]


def first_of(verb: str, kind: str, fate: Iterable[float]) -> Callable[[Envelope], Iterable[float]]:
    """The first such message meets `fate`; all others arrive at once."""
    seen: list[Envelope] = []

    def policy(envelope: Envelope) -> Iterable[float]:
        if verb_of(envelope) == verb and envelope.kind == kind and not seen:
            seen.append(envelope)
            return fate
        return (0.0,)

    return policy


@pytest.mark.parametrize("fate", [(), (0.0, 0.0), (0.0, 0.3), (0.7,)], ids=["lost", "twice", "again-later", "late"])
@pytest.mark.parametrize("kind", ["request", "reply", "publish"])
@pytest.mark.parametrize(
    "verb", [subjects.RESERVE, subjects.PREFILL, subjects.DESTINATION, subjects.COMMIT, subjects.TOKENS]
)
def test_one_message_goes_astray(verb: str, kind: str, fate: tuple[float, ...]) -> None:
    async def scenario() -> None:
        prompt = prompt_of(13)
        async with Cluster(policy=first_of(verb, kind, fate)) as cluster:
            answer = await cluster.ask(prompt, **SAMPLING)
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("seed", range(40))
def test_a_bad_network_loses_nothing(seed: int) -> None:
    """A tenth of the messages are lost, a tenth come twice, and all take their time."""

    async def scenario() -> None:
        rng = random.Random(seed)

        def policy(envelope: Envelope) -> Iterable[float]:
            if verb_of(envelope) == subjects.HEARTBEAT:
                return (0.0,)
            chance = rng.random()
            copies = 0 if chance < 0.1 else 2 if chance < 0.2 else 1
            return tuple(rng.uniform(0.0, 0.03) for _ in range(copies))

        prompts = [prompt_of(rng.randrange(1, 30), seed=seed * 100 + i) for i in range(12)]
        async with Cluster(prefills=2, decodes=2, num_pages=48, policy=policy) as cluster:
            answers = await asyncio.gather(*(cluster.ask(p, timeout_s=60, **SAMPLING) for p in prompts))
            assert [a.error for a in answers] == [None] * len(prompts)
            assert [a.tokens for a in answers] == await oracles(prompts, **SAMPLING)
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("at_s", [0.0, 0.005, 0.012, 0.02, 0.04, 0.06, 0.1])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_dies_and_the_others_are_unharmed(role: str, at_s: float) -> None:
    async def scenario() -> None:
        prompt = prompt_of(25)
        async with Cluster(prefills=2, decodes=2) as cluster:
            asking = asyncio.get_running_loop().create_task(cluster.ask(prompt, timeout_s=30, **SAMPLING))
            await asyncio.sleep(at_s)
            victims = cluster.prefills if role == "prefill" else cluster.decodes
            busy = [w for w in victims if len(w.desk)] or victims
            await busy[0].kill()
            answer = await asking
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            await cluster.settle()

    run_virtual(scenario())


def test_a_gateway_that_dies_leaves_no_page_behind() -> None:
    async def scenario() -> None:
        async with Cluster(num_pages=256) as cluster:
            loop = asyncio.get_running_loop()
            asking = loop.create_task(cluster.ask(prompt_of(25), max_tokens=400, ignore_eos=True))
            await asyncio.sleep(0.5)
            assert len(cluster.decodes[0].desk) == 1
            await cluster.gateway.kill()
            asking.cancel()
            await asyncio.wait({asking})
            async with asyncio.timeout(6):
                while not all(w.is_empty for w in cluster.workers):
                    await asyncio.sleep(0.05)

    run_virtual(scenario())


def test_corrupt_bytes_are_refused_by_name_and_never_decoded() -> None:
    async def scenario() -> None:
        prompt = prompt_of(13)
        async with Cluster() as cluster:
            cluster.network.policy = lambda key, pieces: Mishap(corrupt=True)
            answer = await cluster.ask(prompt, **SAMPLING)
            assert isinstance(answer.error, Corrupt)
            # Token 0 came straight from P and is right; D generated nothing from the spoiled state.
            assert answer.tokens[0] == (await oracle(prompt, **SAMPLING))[0][: len(answer.tokens[0])]
            assert cluster.decodes[0].engine.stats.tokens_generated == 0
            await cluster.settle()

    run_virtual(scenario())


def test_a_slow_transfer_then_abort_then_the_same_pages_again() -> None:
    """The late writer of an aborted ticket cannot touch the pages of the next one."""

    async def scenario() -> None:
        async with Cluster(num_pages=12) as cluster:
            cluster.network.policy = lambda key, pieces: Mishap(layer_delay_s=0.4)
            loop = asyncio.get_running_loop()
            slow = loop.create_task(cluster.ask(prompt_of(30, seed=1), **SAMPLING))
            await asyncio.sleep(0.2)
            slow.cancel()
            await asyncio.wait({slow})
            cluster.network.policy = lambda key, pieces: Mishap()
            prompt = prompt_of(30, seed=2)
            answer = await cluster.ask(prompt, **SAMPLING)
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            await cluster.settle()

    run_virtual(scenario())


def test_a_transfer_that_never_arrives_ends_at_the_deadline() -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            cluster.network.policy = lambda key, pieces: Mishap(lost=True)
            answer = await cluster.ask(prompt_of(13), timeout_s=5.0, **SAMPLING)
            assert isinstance(answer.error, BatonError)
            await cluster.settle()

    run_virtual(scenario())


def test_a_cancel_that_overtakes_its_request_leaves_a_tombstone() -> None:
    def policy(envelope: Envelope) -> Iterable[float]:
        return (
            (0.3,)
            if verb_of(envelope) in (subjects.RESERVE, subjects.PREFILL) and envelope.kind == "request"
            else (0.0,)
        )

    async def scenario() -> None:
        async with Cluster(policy=policy) as cluster:
            asking = asyncio.get_running_loop().create_task(cluster.ask(prompt_of(13), **SAMPLING))
            await asyncio.sleep(0.1)
            asking.cancel()
            await asyncio.wait({asking})
            await asyncio.sleep(1.0)
            assert all(w.is_empty for w in cluster.workers)
            assert cluster.decodes[0].counters["tickets_granted"] == 0
            assert cluster.prefills[0].counters["tickets_granted"] == 0

    run_virtual(scenario())


def test_a_frozen_decode_worker_is_left_for_another() -> None:
    """It beats, grants, and never says anything again: that is not the client's deadline."""

    async def scenario() -> None:
        prompt = prompt_of(13)
        async with Cluster(decodes=2) as cluster:
            frozen: list[str] = []

            def policy(envelope: Envelope) -> Iterable[float]:
                if verb_of(envelope) == subjects.RESERVE and envelope.kind == "reply" and not frozen:
                    frozen.append(envelope.sender)
                beats = verb_of(envelope) in (subjects.HEARTBEAT, subjects.RESERVE)
                is_frozen = bool(frozen) and frozen[0] in (envelope.sender, envelope.receiver)
                return () if is_frozen and not beats else (0.0,)

            cluster.hub.policy = lambda envelope: tuple(policy(envelope))
            answer = await cluster.ask(prompt, timeout_s=60, **SAMPLING)
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            assert answer.timings["attempts"] == 2

    run_virtual(scenario())


def test_a_worker_that_always_says_no_does_not_hold_a_request_beyond_the_queue_time_out() -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            cluster.decodes[0].desk.draining = True
            began = asyncio.get_running_loop().time()
            answer = await cluster.ask(prompt_of(5), timeout_s=300)
            assert answer.error is not None
            assert answer.error.http_status == 503
            assert 29 < asyncio.get_running_loop().time() - began < 32
            await cluster.settle()

    run_virtual(scenario())


def test_a_broken_worker_does_not_attract_everything() -> None:
    """It fails its tickets at once, so it always has the most room: what failed on it goes elsewhere."""

    async def scenario() -> None:
        async with Cluster(decodes=2) as cluster:
            good, broken = cluster.decodes
            broken.desk.draining = True
            load = cluster.ask(prompt_of(60), max_tokens=150, ignore_eos=True, path="local")
            busy = asyncio.get_running_loop().create_task(load)
            while not len(good.desk):
                await asyncio.sleep(0.01)
            broken.desk.draining = False

            async def refuse(*_: object) -> None:
                raise PeerLost("the sidecar is down")

            broken.link.open = refuse  # type: ignore[method-assign]
            await asyncio.sleep(0.6)
            answers = [await cluster.ask(prompt_of(9, seed=i), **SAMPLING) for i in range(6)]
            assert [a.error for a in answers] == [None] * 6
            assert max(a.timings["attempts"] for a in answers) == 2
            assert (await busy).error is None
            await cluster.settle()

    run_virtual(scenario())


def test_what_prefill_says_after_the_hand_over_changes_nothing() -> None:
    """D runs, its answer to the commit got lost, and P gives up: P has no part in the request any more."""

    async def scenario() -> None:
        prompt = prompt_of(13)
        lost = first_of(subjects.COMMIT, "reply", ())
        async with Cluster(policy=lost) as cluster:
            sampling = SAMPLING | {"max_tokens": 80}
            asking = asyncio.get_running_loop().create_task(cluster.ask(prompt, **sampling))
            while cluster.decodes[0].desk.tickets.states() != {"started": 1}:
                await asyncio.sleep(0.005)
            cluster.prefills[0].desk.end_unstarted("the sidecar restarted")
            for ticket in cluster.prefills[0].desk.tickets:
                ticket.end("transfer_failed", "gave up", by="prefill")
            answer = await asking
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **sampling)
            await cluster.settle()

    run_virtual(scenario())


def test_the_door_is_shut_once_decode_has_taken_over() -> None:
    """A late writer with the ticket's own secret is turned away: from the commit on only the engine writes."""

    async def scenario() -> None:
        prompt = prompt_of(13)
        async with Cluster() as cluster:
            prefill, decode = cluster.prefills[0], cluster.decodes[0]
            sent: list[tuple[Any, ...]] = []
            send = prefill.link.send

            async def remember(*args: Any) -> None:
                sent.append(args)
                await send(*args)

            prefill.link.send = remember  # type: ignore[method-assign]
            sampling = SAMPLING | {"max_tokens": 80}
            asking = asyncio.get_running_loop().create_task(cluster.ask(prompt, **sampling))
            while decode.desk.tickets.states() != {"started": 1}:
                await asyncio.sleep(0.005)
            with pytest.raises(TransferRefused):
                await send(*sent[-1])
            answer = await asking
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **sampling)

    run_virtual(scenario())


def test_a_bus_that_stands_still_is_not_a_dead_cluster() -> None:
    """NATS freezes for seconds without closing a connection: streams pause and go on."""

    async def scenario() -> None:
        frozen = False

        def policy(envelope: Envelope) -> Iterable[float]:
            return () if frozen else (0.0,)

        prompt = prompt_of(13)
        sampling = SAMPLING | {"max_tokens": 100}
        async with Cluster(prefills=2, decodes=2, policy=policy) as cluster:
            asking = asyncio.get_running_loop().create_task(cluster.ask(prompt, timeout_s=60, **sampling))
            await asyncio.sleep(0.3)
            frozen = True
            await asyncio.sleep(6)
            frozen = False
            answer = await asking
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **sampling)
            assert cluster.gateway.counters["workers_lost"] == 0
            await cluster.settle()

    run_virtual(scenario())


def test_a_prefill_worker_that_freezes_between_token_0_and_the_commit_is_noticed_in_seconds() -> None:
    """Then D computes the prompt itself: there is no other P."""

    async def scenario() -> None:
        def policy(envelope: Envelope) -> Iterable[float]:
            silent = verb_of(envelope) in (subjects.COMMIT, subjects.HEARTBEAT) and first_token_seen
            return () if silent and "prefill-0" in (envelope.sender, envelope.receiver) else (0.0,)

        first_token_seen = False
        async with Cluster(policy=policy) as cluster:
            first_token_seen = True
            answer = await cluster.ask(prompt_of(13), timeout_s=300, **SAMPLING)
            assert (answer.error, answer.path) == (None, "local")
            assert answer.tokens == await oracle(prompt_of(13), **SAMPLING)
            (recovery,) = answer.timings["recovery"]
            assert recovery["cause"] == "peer_lost"
            assert recovery["detected_s"] < 6
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_proof_that_nobody_touches_them_pages_stay_held(role: str) -> None:
    async def scenario() -> None:
        async def no_proof(*_: object) -> None:
            raise RuntimeError("the sidecar did not say")

        async with Cluster() as cluster:
            worker = (cluster.prefills if role == "prefill" else cluster.decodes)[0]
            proof = "forget" if role == "prefill" else "fence"
            real = getattr(worker.link, proof)
            setattr(worker.link, proof, no_proof)
            await cluster.ask(prompt_of(13), timeout_s=5, **SAMPLING)
            await asyncio.sleep(10)
            total, free, _ = worker.engine.pages()
            setattr(worker.link, proof, real)
            assert free < total
            assert cluster.task_failures

    run_virtual(scenario())
