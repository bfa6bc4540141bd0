"""Take any one protection away, and the simulation notices. Without this its silence would mean nothing."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.decode import flow as decode_flow
from services.decode.desk import DecodeDesk
from services.gateway.inbox import Inbox, Letterbox
from services.gateway.legs import Legs
from services.prefill import flow as prefill_flow
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Group
from shared.protocol.messages import Commit, CommitReply, TokenEntry
from shared.runtime.errors import Corrupt
from shared.transfer.fake import FakeLink
from shared.transfer.link import TicketKey
from shared.worker.gateway_watch import GatewayWatch
from shared.worker.tickets import TicketTable
from tests.sim.simulation import run_seed

_MOST_SEEDS = 60


def first_violation(first: int = 0) -> tuple[int, str]:
    """(how many seeds it took, the invariant)"""
    for seed in range(first, first + _MOST_SEEDS):
        if (violation := run_seed(seed).violation) is not None:
            return seed - first + 1, violation[0]
    raise AssertionError(f"{_MOST_SEEDS} seeds noticed nothing")


def test_the_fence_of_generations_at_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TicketTable, "find", lambda table, key: table._live.get(key.room))
    assert first_violation()[1] in ("a ticket ends only by its own", "nothing raises where nobody looks")


def test_the_fence_of_generations_at_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inbox, "_box", lambda inbox, room, generation: inbox._boxes.get(room))
    assert first_violation()[1] in ("tokens are a prefix of the right answer", "a ticket ends only by its own")


def test_quarantine_until_the_step_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def retire(scheduler: Scheduler, group: Group) -> bool:
        scheduler._end(group)
        scheduler._release(group)
        return True

    monkeypatch.setattr(Scheduler, "retire", retire)
    assert first_violation()[1] == "nothing is reused while in use"


@pytest.mark.parametrize("proof", ["fence", "forget"])
def test_quarantine_until_the_sidecar_is_done(monkeypatch: pytest.MonkeyPatch, proof: str) -> None:
    async def at_once(link: FakeLink, key: TicketKey) -> None:
        """Says that it is quiet, and is not."""

    monkeypatch.setattr(FakeLink, proof, at_once)
    assert first_violation()[1] == "nothing is reused while in use"


def test_the_duplicate_check_on_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    on_commit = DecodeDesk.on_commit

    async def unchecked(desk: DecodeDesk, record: Commit) -> CommitReply:
        if (ticket := desk.tickets.addressed(record)) is not None and ticket.record.done():
            ticket.record.set_result(record)
        return await on_commit(desk, record)

    monkeypatch.setattr(DecodeDesk, "on_commit", unchecked)
    assert first_violation()[1] == "nothing raises where nobody looks"


def test_the_timers_of_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def for_ever(deadline: float, what: str) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(decode_flow, "until", for_ever)
    monkeypatch.setattr(prefill_flow, "until", for_ever)
    assert first_violation()[1] == "every ticket ends by its deadline"


def test_the_sweep_for_lost_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatewayWatch, "sweep", lambda watch: None)
    assert first_violation()[1] in ("a dead gateway's tickets end", "every ticket ends by its deadline")


def test_the_digest_check(monkeypatch: pytest.MonkeyPatch) -> None:
    await_bytes = decode_flow._await_bytes

    async def trusting(*args: Any) -> None:
        with contextlib.suppress(Corrupt):
            await await_bytes(*args)

    monkeypatch.setattr(decode_flow, "_await_bytes", trusting)
    assert first_violation()[1] == "tokens are a prefix of the right answer"


def test_the_index_check_on_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Letterbox.deliver

    def unchecked(box: Letterbox, entry: TokenEntry) -> int:
        if entry.choice < len(box.expected):
            box.expected[entry.choice] = entry.index
        return deliver(box, entry)

    monkeypatch.setattr(Letterbox, "deliver", unchecked)
    assert first_violation()[1] in ("each token exactly once", "tokens are a prefix of the right answer")


def test_the_replay_after_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(legs: Legs) -> None:
        """Asks for nothing."""

    monkeypatch.setattr(Legs, "replay", nothing)
    assert first_violation()[1] == "an error has a cause"
