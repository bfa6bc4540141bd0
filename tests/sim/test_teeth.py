"""Take any one protection away, and the simulation notices. Without this its silence would mean nothing."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace

import pytest

from services.decode import flow as decode_flow
from services.decode.desk import DecodeDesk
from services.decode.ticket import DecodeTicket
from services.gateway.flow import RequestFlow
from services.gateway.inbox import Inbox, Letterbox
from services.gateway.legs import Legs
from services.prefill import flow as prefill_flow
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Group
from shared.protocol.messages import Commit, CommitReply, TokenEntry
from shared.runtime.errors import Corrupt
from shared.transfer.fake import FakeLink
from shared.transfer.link import Receipt, TicketKey
from shared.worker.gateway_watch import GatewayWatch
from shared.worker.tickets import TicketTable
from tests.sim.plan import Trigger, draw
from tests.sim.simulation import Simulation, run_seed

_MOST_SEEDS = 60


def first_violation(seeds: Iterable[int] = range(_MOST_SEEDS)) -> str:
    """The invariant that is broken first."""
    for seed in seeds:
        if (violation := run_seed(seed).violation) is not None:
            print(f"seed {seed}: {violation}")
            return violation[0]
    raise AssertionError("no seed noticed anything")


def aimed(faults: set[str], states: set[str]) -> Iterator[int]:
    """Those of the first 2,000 seeds in which one of the faults is to strike in one of the states, 60 at most."""
    found = (s for s in range(2000) if any(t.fault in faults and t.state in states for t in draw(s).triggers))
    return itertools.islice(found, _MOST_SEEDS)


def test_the_fence_of_generations_at_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TicketTable, "find", lambda table, key: table._live.get(key.room))
    first_violation()  # many things go wrong


def test_the_fence_of_generations_at_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inbox, "_box", lambda inbox, room, generation: inbox._boxes.get(room))
    assert first_violation() in ("tokens are a prefix of the right answer", "a ticket ends only by its own")


def test_quarantine_until_the_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def retire(scheduler: Scheduler, group: Group) -> bool:
        scheduler._end(group)
        scheduler._release(group)
        return True

    monkeypatch.setattr(Scheduler, "retire", retire)
    assert first_violation() == "nothing is reused while in use"


@pytest.mark.parametrize("proof", ["fence", "forget"])
def test_quarantine_until_the_sidecar_is_done(monkeypatch: pytest.MonkeyPatch, proof: str) -> None:
    real = getattr(FakeLink, proof)
    tasks = []

    async def at_once(link: FakeLink, key: TicketKey) -> None:
        """Says that it is quiet before it is."""
        tasks.append(asyncio.get_running_loop().create_task(real(link, key)))

    monkeypatch.setattr(FakeLink, proof, at_once)
    assert first_violation() == "nothing is reused while in use"


def test_the_duplicate_check_on_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    on_commit = DecodeDesk.on_commit

    async def unchecked(desk: DecodeDesk, record: Commit) -> CommitReply:
        if (ticket := desk.tickets.addressed(record)) is not None and ticket.record.done():
            ticket.record.set_result(record)
        return await on_commit(desk, record)

    monkeypatch.setattr(DecodeDesk, "on_commit", unchecked)
    assert first_violation() == "nothing raises where nobody looks"


def test_the_timers_of_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def for_ever(deadline: float, what: str) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(decode_flow, "until", for_ever)
    monkeypatch.setattr(prefill_flow, "until", for_ever)
    for seed in range(_MOST_SEEDS):
        plan = draw(seed)
        plan = replace(
            plan,
            visits=tuple(replace(visit, timeout_s=1.0) for visit in plan.visits),
            triggers=tuple(Trigger("isolate prefill", "prefill", "waiting", nth, 0.0) for nth in (1, 4)),
        )
        if (violation := Simulation(plan).run().violation) is not None:
            break
    assert violation is not None
    assert violation[0] == "every ticket ends by its deadline"


@pytest.mark.slow
def test_the_sweep_for_lost_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatewayWatch, "sweep", lambda watch: None)
    seeds = aimed({"crash gateway"}, {"started", "waiting", "reserved", "computing"})
    assert first_violation(seeds) in ("a dead gateway's tickets end", "every ticket ends by its deadline")


def test_the_digest_check(monkeypatch: pytest.MonkeyPatch) -> None:
    await_bytes = decode_flow._await_bytes

    async def trusting(d: decode_flow.DecodeFlow, ticket: DecodeTicket, record: Commit) -> Receipt:
        try:
            return await await_bytes(d, ticket, record)
        except Corrupt:
            return await d.link.received(ticket.key)

    monkeypatch.setattr(decode_flow, "_await_bytes", trusting)
    assert first_violation() == "tokens are a prefix of the right answer"


def test_the_index_check_on_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Letterbox.deliver

    def unchecked(box: Letterbox, entry: TokenEntry) -> int:
        if entry.choice < len(box.expected):
            box.expected[entry.choice] = entry.index
        return deliver(box, entry)

    monkeypatch.setattr(Letterbox, "deliver", unchecked)
    assert first_violation() in ("each token exactly once", "tokens are a prefix of the right answer")


def test_an_answer_that_has_begun_is_taken_up_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestFlow, "_are_too_many", lambda flow, failures: flow._history.begun)
    assert first_violation(aimed({"crash decode"}, {"started"})) == "an error has a cause"


def test_the_replay_after_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(legs: Legs) -> None:
        """Asks for nothing."""

    monkeypatch.setattr(Legs, "replay", nothing)
    assert first_violation() == "an error has a cause"
