"""Faults that systems of this kind have had in public (`docs/failure-modes.md` lists them), where no other test is
about them: each is stated once, on the whole simulated cluster."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from services.gateway.generation import GenerationRequest
from shared.bus.memory import Envelope, MemoryBus
from shared.protocol import subjects
from shared.protocol.messages import (
    Cancel,
    Commit,
    CommitReply,
    CommitStatus,
    FirstToken,
    Prefill,
    Reserve,
    SamplingSpec,
    TicketMessage,
    Verdict,
)
from shared.protocol.wire import WireModel, decode, encode
from shared.runtime.errors import BatonError, GeometryMismatch, TransferError, TransferTimeout
from shared.transfer.fake import Mishap
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.processes import Worker
from tests.sim.test_flows import oracle, oracles
from tests.sim.virtual_time import run_virtual

SAMPLING: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.7, "seed": 11}


def verb_of(envelope: Envelope) -> str:
    return envelope.subject.rsplit(".", 1)[-1]


def order(
    cluster: Cluster, room: int, generation: int = 1, *, gateway: str = "", prefill: str | None = None
) -> Reserve:
    return Reserve(
        room=room,
        generation=generation,
        request_id="req",
        gateway=gateway or cluster.gateway.peer,
        prefill=prefill,
        identity=cluster.decodes[0].engine.identity,
        prompt=prompt_of(9),
        sampling=SamplingSpec(max_tokens=500, ignore_eos=True, temperature=0),
        remaining_s=300.0,
    )


async def tell(bus: MemoryBus, worker: Worker, verb: str, message: WireModel, answer: type[Any] = Verdict) -> Any:
    where = subjects.subject(worker.role, worker.peer, verb)
    return decode(answer, await bus.request(where, encode(message), 5.0))


def no_handler_failed(cluster: Cluster) -> None:
    assert {p.name: p.bus.stats.handler_errors for p in cluster.processes} == {p.name: 0 for p in cluster.processes}


def test_client_ids_that_are_equal_or_begin_alike_are_never_mixed_up() -> None:
    """Tickets have names of our own; what a client calls its request is a word in a log."""

    async def scenario() -> None:
        prompts = [prompt_of(7 + k, seed=k) for k in range(4)]
        expected = await oracles(prompts, **SAMPLING)
        async with Cluster(num_pages=128) as cluster:

            async def ask(id: str, prompt: tuple[int, ...]) -> list[int]:
                request = GenerationRequest(id, prompt, SamplingSpec(**SAMPLING), "auto", False, 60.0)
                return [event.token async for batch in cluster.gateway.flow.generate(request) for event in batch]

            ids = ["1", "1", "11", "1"]
            answers = await asyncio.gather(*(ask(id, prompt) for id, prompt in zip(ids, prompts, strict=True)))
            assert [[answer] for answer in answers] == expected
            await cluster.settle()

    run_virtual(scenario())


def test_what_an_earlier_cluster_left_on_the_bus_reaches_nobody() -> None:
    """Orders that were on their way when everything was restarted: they name incarnations that are no more."""

    async def scenario() -> None:
        late = False

        def policy(envelope: Envelope) -> Iterable[float]:
            is_order = verb_of(envelope) in (subjects.RESERVE, subjects.PREFILL) and envelope.kind == "request"
            return (2.0,) if late and is_order else (0.0,)

        async with Cluster(policy=policy) as cluster:
            late = True
            asking = [asyncio.get_running_loop().create_task(cluster.ask(prompt_of(9, seed=k))) for k in range(3)]
            await asyncio.sleep(0.1)
            late = False
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)
            for process in list(cluster.processes):
                await cluster.restart(process)
            await asyncio.sleep(3.0)
            assert [worker.counters["tickets_granted"] for worker in cluster.workers] == [0, 0]
            prompt = prompt_of(13)
            answer = await cluster.ask(prompt, **SAMPLING)
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            await cluster.settle()

    run_virtual(scenario())


def test_a_pool_full_of_dead_reservations_empties_without_any_traffic() -> None:
    """The sweep has a timer of its own: nothing is sent, nothing can be scheduled, and still it runs."""

    async def scenario() -> None:
        async with Cluster(num_pages=16) as cluster:
            worker = cluster.decodes[0]
            bus: MemoryBus = cluster.hub.client("ghost")
            granted = 0
            while (await tell(bus, worker, subjects.RESERVE, order(cluster, granted + 1, gateway="ghost-1"))).ok:
                granted += 1
            assert granted > 1
            assert worker.engine.pages()[1] < 5
            await asyncio.sleep(10.0)
            assert worker.is_empty
            assert (await cluster.ask(prompt_of(13), **SAMPLING)).error is None

    run_virtual(scenario())


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_one_failed_transfer_of_several_is_never_taken_for_success(failing: int) -> None:
    """Of the chunks of one prompt one fails: the answer is right by another attempt, or it is an error and not a
    finish."""

    async def scenario() -> None:
        prompt = prompt_of(30)
        async with Cluster() as cluster:
            count = 0

            def policy(key: object, pieces: object) -> Mishap:
                nonlocal count
                count += 1
                return Mishap(error=TransferTimeout("injected")) if count == failing else Mishap()

            cluster.network.policy = policy
            answer = await cluster.ask(prompt, **SAMPLING)
            assert count > 4, "the prompt has several chunks"
            assert answer.error is None
            assert answer.tokens == await oracle(prompt, **SAMPLING)
            assert answer.timings["attempts"] == 2
            await cluster.settle()

    run_virtual(scenario())


def test_prefills_abort_in_a_transfer_is_an_error_and_no_finish() -> None:
    async def scenario() -> None:
        async with Cluster() as cluster:
            cluster.network.policy = lambda key, pieces: Mishap(error=TransferTimeout("injected"))
            answer = await cluster.ask(prompt_of(30), **SAMPLING)
            assert isinstance(answer.error, TransferError)
            assert answer.error.http_status == 500
            assert answer.finishes == [None]
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"components": ("history", "memory", "view")}, "decode history, memory, view"),
        ({"unit_bytes": (128, 16, 64)}, "component window: a unit has 64 bytes at decode, not 128"),
        ({"page_tokens": 8}, "component history: a unit has 128 bytes at decode, not 256"),
        ({"unit_bytes": (128, 16)}, "2 sizes at decode for 3 components"),
        ({"tp_size": 2}, "1 rank(s) share the state at prefill and 2 at decode"),
        ({"tp_size": 2, "unit_bytes": (64, 16, 128)}, "1 rank(s) share the state at prefill and 2 at decode"),
    ],
)
def test_workers_whose_state_does_not_fit_refuse_each_other_by_name(change: dict[str, Any], message: str) -> None:
    """Told before a byte is moved or computed, and naming what differs."""

    async def scenario() -> None:
        async with Cluster() as cluster:
            engine = cluster.decodes[0].engine
            engine.geometry = engine.geometry.model_copy(update=change)
            answer = await cluster.ask(prompt_of(13), path="remote", strict=True, timeout_s=10, **SAMPLING)
            assert isinstance(answer.error, GeometryMismatch)
            assert message in str(answer.error)
            assert cluster.decodes[0].link.counters.get("admitted", 0) == 0
            assert cluster.prefills[0].engine.stats.steps == 0
            await cluster.settle()

    run_virtual(scenario())


def test_a_room_is_never_used_twice() -> None:
    """Not under another generation, live or ended; and what was told of it stays."""

    async def scenario() -> None:
        async with Cluster() as cluster:
            worker = cluster.decodes[0]
            bus: MemoryBus = cluster.hub.client("stranger")
            total = worker.engine.pages()[0]
            assert (await tell(bus, worker, subjects.RESERVE, order(cluster, 5, 2))).ok
            held = total - worker.engine.pages()[1]
            for generation in (1, 3):
                assert (await tell(bus, worker, subjects.RESERVE, order(cluster, 5, generation))).code
            assert (await tell(bus, worker, subjects.RESERVE, order(cluster, 5, 2))).ok, "asked again it is still a yes"
            assert total - worker.engine.pages()[1] == held
            await tell(bus, worker, subjects.CANCEL, Cancel(room=5, generation=2, reason="test"))
            await asyncio.sleep(0.5)
            await tell(bus, worker, subjects.CANCEL, Cancel(room=5, generation=9, reason="later"))
            for generation in (1, 2, 3, 9):
                verdict = await tell(bus, worker, subjects.RESERVE, order(cluster, 5, generation))
                assert not verdict.ok
            assert worker.is_empty
            assert worker.counters["rooms_reused"] == 5
            no_handler_failed(cluster)

    run_virtual(scenario())


def test_strangers_cannot_make_a_worker_forget_what_has_ended() -> None:
    """Cancels of rooms that never were have a memory of their own, and it is bounded."""

    async def scenario() -> None:
        async with Cluster() as cluster:
            worker = cluster.decodes[0]
            bus: MemoryBus = cluster.hub.client("stranger")
            assert (await tell(bus, worker, subjects.RESERVE, order(cluster, 5))).ok
            await tell(bus, worker, subjects.CANCEL, Cancel(room=5, generation=1, reason="test"))
            await asyncio.sleep(0.5)
            for room in range(100, 5100):
                await worker.desk.on_cancel(Cancel(room=room, generation=1, reason="x" * 1000))
            verdict = await tell(bus, worker, subjects.RESERVE, order(cluster, 5))
            assert (verdict.ok, verdict.code) == (False, "dead_room")
            assert worker.counters["late_cancel"] >= 5000

    run_virtual(scenario())


ODD_RECORDS: list[dict[str, Any]] = [
    {"first": ()},
    {"first": (FirstToken(choice=1, token=3),)},
    {"first": (FirstToken(choice=0, token=3),) * 2},
    {"first": (FirstToken(choice=0, token=1 << 30),)},
    {"first": (FirstToken(choice=0, token=-1),)},
    {"prompt_len": 1},
    {"components": ()},
]


@pytest.mark.parametrize("change", ODD_RECORDS, ids=str)
def test_a_commit_record_that_cannot_be_true_ends_its_ticket_alone(change: dict[str, Any]) -> None:
    """Tokens for choices there are not, tokens that no vocabulary has, another prompt, no bytes: refused, typed, and
    nobody else's step fails."""

    async def scenario() -> None:
        async with Cluster(num_pages=96) as cluster:
            decode_worker = cluster.decodes[0]
            neighbour = asyncio.get_running_loop().create_task(
                cluster.ask(prompt_of(9), max_tokens=80, ignore_eos=True)
            )
            while decode_worker.desk.tickets.states() != {"started": 1}:
                await asyncio.sleep(0.005)
            commit = decode_worker.desk.on_commit  # type: ignore[union-attr]
            spoiled: list[CommitReply] = []

            async def on_commit(record: Commit) -> CommitReply:
                reply = await commit(record.model_copy(update=change))
                spoiled.append(reply)
                return reply

            decode_worker.desk.on_commit = on_commit  # type: ignore[method-assign, union-attr]
            for subscription in cluster.hub._subscriptions:
                if subscription.pattern.endswith(".commit"):

                    async def handler(message: Any) -> bytes:
                        return encode(await on_commit(decode(Commit, message.data)))

                    subscription.lane.handler = handler
            answer = await cluster.ask(prompt_of(13), timeout_s=30, **SAMPLING)
            assert isinstance(answer.error, BatonError)
            assert type(answer.error) is not BatonError, "an error of its own kind"
            assert CommitStatus.COMMITTED not in {reply.status for reply in spoiled}
            assert (await neighbour).error is None
            await cluster.settle()
            no_handler_failed(cluster)

    run_virtual(scenario())


@pytest.mark.parametrize("kind", [Reserve, Prefill])
def test_names_that_are_no_peers_are_malformed(kind: type[TicketMessage]) -> None:
    """They would become part of a subject: a subject of somebody else, or none."""

    async def scenario() -> None:
        async with Cluster() as cluster:
            worker: Worker = (cluster.decodes if kind is Reserve else cluster.prefills)[0]
            bus: MemoryBus = cluster.hub.client("stranger")
            verb = subjects.RESERVE if kind is Reserve else subjects.PREFILL
            right = json.loads(encode(order(cluster, 5)))
            if kind is Prefill:
                right = {**right, "kind": "prefill", "decode": "d-1", "attempts": right.get("attempts")}
                right = {name: right[name] for name in Prefill.model_fields if right.get(name) is not None}
            where = subjects.subject(worker.role, worker.peer, verb)
            for name in ("", "A", "a.b", "a b", "*", "x" * 65, "gateway-0-1.tokens"):
                wrong = json.dumps(right | {"gateway": name}).encode()
                assert decode(Verdict, await bus.request(where, wrong, 5.0)).code == "protocol_error"
            assert worker.counters[f"malformed_{verb}"] == 7
            assert worker.is_empty

    run_virtual(scenario())
