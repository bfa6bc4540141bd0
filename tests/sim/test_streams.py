"""Resumable streams in a simulated cluster: a stream goes from gateway to gateway, and its client gets what one
undisturbed request gives."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from services.gateway.api.plan import Plan
from services.gateway.generation import GenerationRequest
from services.gateway.streams.desk import Found, Streams
from services.gateway.streams.journal import Journal
from services.gateway.streams.reader import Reader
from shared.bus.memory import Envelope
from shared.protocol.messages import SamplingSpec
from shared.protocol.subjects import ROLL_CALL
from shared.runtime.errors import BatonError, JournalUnavailable, NotResumable, StreamMoved, StreamNotFound
from shared.text.tokenizer import TextModel
from tests.sim.asking import now, until, verb_of
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.processes import Gateway, Worker
from tests.sim.test_flows import oracle
from tests.sim.virtual_time import run_virtual

GRACE_S = 8.0
PROMPT = prompt_of(21)
MANY: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
SAMPLED: dict[str, Any] = MANY | {"temperature": 0.9, "seed": 5, "n": 3, "presence_penalty": 0.4}
NO_TEXT = cast(TextModel, None)
"""Without stop strings nobody reads a token's text here."""
KEY = "a" * 64


def plan_for(prompt: Sequence[int] = PROMPT, **sampling: Any) -> Plan:
    spec = SamplingSpec(**({"temperature": 0.0} | sampling))
    request = GenerationRequest("req-sim", tuple(prompt), spec, timeout_s=60.0, orphan_grace_s=GRACE_S)
    return Plan(
        chat=False,
        model="toy",
        request_id="req-sim",
        requests=(request,),
        echoes=("",),
        n=spec.n,
        stops=(),
        stream=True,
        include_usage=False,
        timings=True,
        token_ids=True,
        tell_baton=True,
        resumable=True,
    )


async def streams_of(gateway: Gateway, grace_s: float = GRACE_S) -> Streams:
    journal = Journal(gateway.bus, gateway.clock, grace_s, 60.0)
    streams = Streams(gateway.deps, journal, gateway.flow, NO_TEXT, grace_s, 100)
    await streams.start()
    return streams


class Client:
    """Reads one stream, over one connection after another, and keeps all that came."""

    def __init__(self, n: int = 1) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.finishes: list[str | None] = [None] * n
        self.id = ""
        self.timings: dict[str, object] = {}
        self.error: BatonError | None = None
        self._reader: Reader | None = None

    @property
    def has(self) -> tuple[int, ...]:
        return tuple(map(len, self.tokens))

    async def read(self, found: Found, leave_at: int | None = None) -> None:
        """To its end, or until it has so many tokens of its first choice."""
        self.id = found.id
        reader = self._reader = found.attach(self.has)
        generation = reader.generate(found.plan.requests[0])
        try:
            async for batch in generation:
                for event in batch:
                    assert event.index == len(self.tokens[event.choice]), "each index once, in order"
                    assert self.finishes[event.choice] is None
                    self.tokens[event.choice].append(event.token)
                    self.finishes[event.choice] = event.finish
                if leave_at is not None and len(self.tokens[0]) >= leave_at:
                    return
            self.timings = generation.timings()
        except BatonError as error:
            self.error = error
        finally:
            reader.close()

    async def come_back(self, streams: Streams, leave_at: int | None = None, key: str = KEY) -> None:
        await self.read(await streams.find(self.id, key, lambda said: None), leave_at)


def serving(cluster: Cluster) -> Worker:
    return next(worker for worker in cluster.decodes if worker.alive and len(worker.desk))


def run_with(
    scenario: Callable[[Cluster, Streams, Streams], Any], *, decodes: int = 1, grace_s: float = GRACE_S, **more: Any
) -> None:
    async def main() -> None:
        async with Cluster(gateways=2, prefills=1, decodes=decodes, **more) as cluster:
            one, two = [await streams_of(gateway, grace_s) for gateway in cluster.gateways]
            await scenario(cluster, one, two)

    run_virtual(main())


@pytest.mark.parametrize("sampling", [MANY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("number", [0, 1], ids=["same", "other"])
def test_a_client_comes_back(sampling: dict[str, Any], number: int) -> None:
    async def scenario(cluster: Cluster, *streams: Streams) -> None:
        client = Client(sampling.get("n", 1))
        await client.read(await streams[0].open(plan_for(**sampling), KEY, 0), leave_at=7)
        await asyncio.sleep(0.1)
        await client.come_back(streams[number])
        assert client.error is None
        assert client.tokens == await oracle(PROMPT, **sampling)
        assert set(client.finishes) == {"length"}
        assert client.timings["recoveries"] == 0
        assert cluster.gateways[1].counters["tickets_adopted"] == number
        await cluster.settle()

    run_with(scenario)


@pytest.mark.parametrize("sampling", [MANY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("wait_s", [0.0, 2.0, 5.0], ids=["at once", "later", "after its loss was noticed"])
def test_the_gateway_dies_and_another_adopts_the_ticket(sampling: dict[str, Any], wait_s: float) -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        long = sampling | {"max_tokens": 400}
        client = Client(long.get("n", 1))
        await client.read(await one.open(plan_for(**long), KEY, 0), leave_at=7)
        cluster.gateways[0].kill_now()
        await asyncio.sleep(wait_s)
        await client.come_back(two)
        assert client.error is None
        assert client.tokens == await oracle(PROMPT, **long)
        assert client.timings["recoveries"] == 0
        assert cluster.gateways[1].counters["tickets_adopted"] == 1
        assert sum(worker.counters["tickets_granted"] for worker in cluster.decodes) == 1
        await cluster.settle()

    run_with(scenario, step_s=0.03, num_pages=512)


@pytest.mark.parametrize("sampling", [MANY, SAMPLED], ids=["greedy", "sampled"])
def test_the_gateway_and_the_decode_worker_die(sampling: dict[str, Any]) -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client(sampling.get("n", 1))
        await client.read(await one.open(plan_for(**sampling), KEY, 0), leave_at=7)
        serving(cluster).kill_now()
        cluster.gateways[0].kill_now()
        had = [list(tokens) for tokens in client.tokens]
        await client.come_back(two)
        assert client.error is None
        assert [tokens[: len(before)] for tokens, before in zip(client.tokens, had, strict=True)] == had
        assert client.tokens == await oracle(PROMPT, **sampling)
        assert (client.timings["recoveries"], cluster.gateways[1].counters["tickets_not_adopted"]) == (1, 1)
        await cluster.settle()

    run_with(scenario, decodes=2)


@pytest.mark.parametrize("dies", ["gateway", "both"])
def test_choices_that_are_over_stay_over(dies: str) -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        free = await oracle(PROMPT, **SAMPLED)
        ends = next(t for k, t in enumerate(free[0][4:]) if t not in free[0][: 4 + k] + free[1][:30] + free[2][:30])
        sampling = SAMPLED | {"stop_token_ids": (ends,)}
        whole = await oracle(PROMPT, **sampling)
        assert len(whole[0]) < 20 < min(len(whole[1]), len(whole[2]))
        client = Client(3)
        reading = asyncio.get_running_loop().create_task(client.read(await one.open(plan_for(**sampling), KEY, 0)))
        await until(lambda: client.finishes[0] is not None and client.has[1] > len(whole[0]) + 1, 20.0)
        if dies == "both":
            serving(cluster).kill_now()
        cluster.gateways[0].kill_now()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await client.come_back(two)
        assert client.error is None
        assert client.tokens == whole
        assert client.finishes[0] == "stop"
        await cluster.settle()

    run_with(scenario, decodes=2, step_s=0.03)


def test_the_decode_worker_hears_of_a_stop_string_from_whoever_goes_on() -> None:
    """The gateway had found it and written it down, and died before it could say so."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client(3)
        await client.read(await one.open(plan_for(**SAMPLED | {"max_tokens": 300}), KEY, 0), leave_at=5)
        live = one._live[client.id]
        live._over.add(0)
        live.ledger.draft.stopped.add(0)
        live._come.set()
        await until(lambda: live.tape.prompts[0].stopped[0], 5.0)
        cluster.gateways[0].kill_now()
        (ticket,) = cluster.decodes[0].desk.tickets
        assert not ticket.choices[0].done
        await client.come_back(two)
        assert client.has[1:] == (300, 300)
        assert ticket.choices[0].stopped
        assert len(ticket.choices[0].tokens) < 300
        await cluster.settle()

    run_with(scenario, num_pages=1024, step_s=0.02)


def test_only_workers_of_the_model_that_began_may_go_on() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client, plan = Client(), plan_for(**MANY)
        plan = replace(plan, requests=tuple(replace(request, path="local") for request in plan.requests))
        await client.read(await one.open(plan, KEY, 0), leave_at=7)
        old, heir = cluster.decodes
        if not len(old.desk):
            old, heir = heir, old
        old.kill_now()
        cluster.gateways[0].kill_now()
        right = heir.engine.identity
        heir.engine.identity = "another-model"
        heir.heart.changed()
        await until(lambda: cluster.gateways[1].registry.ready("decode")[-1].report.identity == "another-model", 5.0)
        reading = asyncio.get_running_loop().create_task(client.come_back(two))
        await asyncio.sleep(10.0)
        assert client.has == (7,)
        heir.engine.identity = right
        heir.heart.changed()
        await reading
        assert client.tokens == await oracle(PROMPT, **MANY)
        await cluster.settle()

    run_with(scenario, decodes=2)


def test_what_is_written_down_never_changes_though_no_client_got_it() -> None:
    """The journal is ahead of every client, and whoever goes on is bound by it."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client, other = Client(), Client()
        await client.read(await one.open(plan_for(**MANY), KEY, 0), leave_at=3)
        await asyncio.sleep(0.1)
        found = await one.find(client.id, KEY, lambda said: None)
        written = found.tape.said()
        assert written[0] > client.has[0]
        other.id = client.id
        await other.come_back(two)
        assert other.tokens == await oracle(PROMPT, **MANY)
        await client.come_back(one)
        assert client.tokens == other.tokens
        await cluster.settle()

    run_with(scenario)


def test_a_second_connection_ends_the_first() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        first, second = Client(), Client()
        found = await one.open(plan_for(**MANY), KEY, 0)
        reading = asyncio.get_running_loop().create_task(first.read(found))
        await until(lambda: first.has[0] >= 5, 5.0)
        second.id = found.id
        await second.come_back(one)
        await reading
        assert isinstance(first.error, StreamMoved)
        assert second.tokens == await oracle(PROMPT, **MANY)
        assert first.tokens[0] == second.tokens[0][: first.has[0]]
        await cluster.settle()

    run_with(scenario)


def test_many_ask_at_many_gateways_at_once_and_one_gets_it() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        owner = Client()
        await owner.read(await one.open(plan_for(**MANY | {"max_tokens": 120}), KEY, 0), leave_at=5)
        clients = [Client() for _ in range(6)]
        for client in clients:
            client.id = owner.id
        reads = [client.come_back((one, two)[k % 2]) for k, client in enumerate(clients)]
        failed = [one for one in await asyncio.gather(*reads, return_exceptions=True) if one is not None]
        assert all(isinstance(error, JournalUnavailable) for error in failed), failed
        whole = await oracle(PROMPT, **MANY | {"max_tokens": 120})
        done = [client for client in clients if client.finishes[0] is not None]
        assert len(done) >= 1
        assert all(client.tokens[0] == whole[0][: client.has[0]] for client in clients)
        await cluster.settle(within_s=2 * GRACE_S)

    run_with(scenario, num_pages=256)


def test_a_gateway_that_lost_its_stream_neither_writes_nor_sends() -> None:
    """It did not answer in time, and another one took the stream."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        first, second = Client(), Client()
        long = MANY | {"max_tokens": 300}
        found = await one.open(plan_for(**long), KEY, 0)
        reading = asyncio.get_running_loop().create_task(first.read(found))
        await until(lambda: first.has[0] >= 5, 5.0)
        cluster.gateways[0].bus.cut()  # its word to let go cannot reach it
        second.id = found.id
        await second.come_back(two, leave_at=100)
        stood = first.has[0]
        cluster.gateways[0].bus.mend()
        await second.come_back(two)
        await reading
        assert isinstance(first.error, StreamMoved)
        assert first.has[0] == stood
        assert second.tokens == await oracle(PROMPT, **long)
        await cluster.settle(within_s=2 * GRACE_S)

    run_with(scenario, num_pages=512)


def test_nobody_comes_back() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client()
        await client.read(await one.open(plan_for(**MANY | {"max_tokens": 2000}), KEY, 0), leave_at=5)
        left_at = now()
        assert one.num_detached == 1
        await until(lambda: not len(cluster.gateways[0].inbox), 2 * GRACE_S)
        assert GRACE_S <= now() - left_at < 1.5 * GRACE_S
        assert cluster.gateways[0].counters["streams_expired"] == 1
        await cluster.settle()
        for streams in (one, two):
            with pytest.raises(StreamNotFound):
                await client.come_back(streams)
        assert cluster.hub.stores is not None
        assert [store.entries for store in cluster.hub.stores.values()] == [{}, {}]

    run_with(scenario, num_pages=1024)


def test_who_has_lost_a_stream_does_not_remove_it_when_its_own_grace_is_over() -> None:
    """Its bus was away, so it does not know yet that its stream is another's."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client()
        long = MANY | {"max_tokens": 900}
        await client.read(await one.open(plan_for(**long), KEY, 0), leave_at=5)
        cluster.gateways[0].bus.cut()
        await client.come_back(two, leave_at=20)
        live = next(iter(one._live.values()))
        await live.end(StreamMoved())  # stands still
        await asyncio.sleep(GRACE_S / 2)
        cluster.gateways[0].bus.mend()
        await client.come_back(two, leave_at=400)
        await until(lambda: cluster.gateways[0].counters["streams_expired"] == 1, 2 * GRACE_S)
        await client.come_back(two)
        assert client.error is None
        assert client.tokens == await oracle(PROMPT, **long)
        await cluster.settle(within_s=2 * GRACE_S)

    run_with(scenario, num_pages=1024, step_s=0.02)


def test_what_is_still_being_read_is_kept() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        found = await one.open(plan_for(**MANY), KEY, 0)
        reader = found.attach((0,))  # and reads slowly
        await until(lambda: found.tape.ended, 10.0)
        await asyncio.sleep(3 * GRACE_S)
        reader.close()
        late = Client()
        late.id = found.id
        await asyncio.sleep(GRACE_S * 0.9)
        await late.come_back(two)
        assert late.tokens == await oracle(PROMPT, **MANY)
        await asyncio.sleep(2 * GRACE_S)
        with pytest.raises(StreamNotFound):
            await late.come_back(one)
        await cluster.settle()

    run_with(scenario)


def test_its_gateway_dies_and_nobody_comes_back() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client()
        await client.read(await one.open(plan_for(**MANY | {"max_tokens": 2000}), KEY, 0), leave_at=5)
        cluster.gateways[0].kill_now()
        died_at = now()
        await until(lambda: not len(cluster.decodes[0].desk), 3 * GRACE_S)
        assert GRACE_S <= now() - died_at < GRACE_S + 8.0
        await asyncio.sleep(max(0.0, died_at + 1.3 * GRACE_S - now()))
        with pytest.raises(StreamNotFound):
            await client.come_back(two)
        cluster.gateways.pop(0)
        await cluster.settle()

    run_with(scenario, num_pages=1024)


def test_a_ticket_that_cannot_be_resumed_ends_with_its_gateway_as_ever() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        asking = asyncio.get_running_loop().create_task(cluster.ask(PROMPT, **MANY | {"max_tokens": 2000}))
        await until(lambda: len(cluster.decodes[0].desk) > 0, 5.0)
        cluster.gateways[0].kill_now()
        died_at = now()
        await until(lambda: not len(cluster.decodes[0].desk), GRACE_S)
        assert now() - died_at < 5.0
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    run_with(scenario, num_pages=1024)


def test_another_key_finds_nothing() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client()
        await client.read(await one.open(plan_for(**MANY), KEY, 0), leave_at=5)
        for streams in (one, two):
            for key in ("", "b" * 64):
                with pytest.raises(StreamNotFound):
                    await client.come_back(streams, key=key)
        await client.come_back(two)
        assert client.tokens == await oracle(PROMPT, **MANY)
        with pytest.raises(StreamNotFound):  # nor once it has ended
            await client.come_back(two, key="")
        await cluster.settle()

    run_with(scenario)


def test_long_streams_are_written_in_parts() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        sampling = MANY | {"max_tokens": 700, "logprobs": 1}
        client, late = Client(), Client()
        await client.read(await one.open(plan_for(**sampling), KEY, 0), leave_at=600)
        store = (cluster.hub.stores or {})["baton-v1-streams"]
        (state,) = (entry.value for entry, _ in store.entries.values())
        assert state.count(b'"logprob"') < 300
        cluster.gateways[0].kill_now()
        await client.come_back(two)
        assert client.tokens == await oracle(PROMPT, **sampling)
        late.id = client.id
        await late.come_back(two)
        assert late.tokens == client.tokens
        await cluster.settle()

    run_with(scenario, num_pages=512)


def test_the_ends_of_streams_are_removed() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        clients = [Client() for _ in range(3)]
        await asyncio.gather(*[client.read(await one.open(plan_for(**MANY), KEY, 0)) for client in clients])
        stores = cluster.hub.stores or {}
        await asyncio.sleep(GRACE_S / 2)
        again = Client()
        again.id = clients[0].id
        await again.come_back(two)
        assert again.tokens == clients[0].tokens
        await asyncio.sleep(2 * GRACE_S)
        with pytest.raises(StreamNotFound):
            await again.come_back(two)
        assert [dict(store.entries) for store in stores.values() if store.bucket.name.endswith("parts")] == [{}]
        await cluster.settle()

    run_with(scenario)


def test_a_decode_worker_is_lost_while_nobody_reads() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client()
        await client.read(await one.open(plan_for(**SAMPLED | {"n": 1}), KEY, 0), leave_at=5)
        serving(cluster).kill_now()
        await asyncio.sleep(2.0)
        await client.come_back(two)
        assert client.tokens == await oracle(PROMPT, **SAMPLED | {"n": 1})
        await cluster.settle()

    run_with(scenario, decodes=2)


def test_roll_calls_do_not_end_a_ticket_that_was_given_over() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client()
        long = MANY | {"max_tokens": 400}
        await client.read(await one.open(plan_for(**long), KEY, 0), leave_at=5)
        await client.come_back(two, leave_at=20)
        began = now()
        await client.come_back(two)
        assert now() - began > 4.0, "no roll call came"
        assert client.tokens == await oracle(PROMPT, **long)
        assert sum(worker.counters["tickets_granted"] for worker in cluster.decodes) == 1
        await cluster.settle()

    asked: list[Envelope] = []

    def policy(envelope: Envelope) -> Sequence[float]:
        if verb_of(envelope) == ROLL_CALL:
            asked.append(envelope)
        return (0.0,)

    run_with(scenario, step_s=0.02, num_pages=512, policy=policy)
    assert asked


def test_a_lost_answer_of_the_journal_is_found_out() -> None:
    """The state was written and nobody heard so: it is not taken for another gateway's word."""

    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        client = Client()
        reading = asyncio.get_running_loop().create_task(client.read(await one.open(plan_for(**MANY), KEY, 0)))
        for _ in range(12):
            await asyncio.sleep(0.03)
            cluster.gateways[0].bus.cut()
            await asyncio.sleep(0)
            cluster.gateways[0].bus.mend()
        await reading
        assert client.error is None
        assert client.tokens == await oracle(PROMPT, **MANY)
        await cluster.settle()

    run_with(scenario)


def test_without_a_journal_it_is_refused() -> None:
    async def scenario(cluster: Cluster, one: Streams, two: Streams) -> None:
        cluster.hub.stores = None
        with pytest.raises(NotResumable):
            await one.open(plan_for(**MANY), KEY, 0)
        with pytest.raises(NotResumable):
            await one.find("0" * 32, KEY, lambda said: None)
        answer = await cluster.ask(PROMPT, **MANY)
        assert answer.error is None

    run_with(scenario)


def test_a_plan_and_its_record_are_the_same() -> None:
    from services.gateway.streams.records import plan_of, request_of

    plan = replace(plan_for(**SAMPLED), stops=("x", "y"), echoes=("echo",), include_usage=True, chat=True)
    assert plan_of(request_of(plan, KEY, 7), 60.0, GRACE_S) == plan
