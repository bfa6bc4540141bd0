"""D's front desk: what arrives over NATS becomes a ticket, an event of a ticket, or a counted no-op."""

import asyncio
import secrets
from dataclasses import dataclass, field

from services.decode import flow
from services.decode.loop import TokenOutbox
from services.decode.ticket import LiveTicket
from shared.bus.base import Subscription
from shared.bus.listen import listen
from shared.engine.api import Engine
from shared.machines import decode as machine
from shared.machines.stepping import CANCELLED, FINISHED, Cause
from shared.protocol import subjects
from shared.protocol.messages import (
    Cancel,
    Commit,
    CommitReply,
    CommitStatus,
    Fail,
    Replay,
    ReplayReply,
    ReplayStatus,
    Reserve,
    TokenEntry,
    Verdict,
)
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError
from shared.runtime.tombstones import Tombstones
from shared.transfer.link import Link, TicketKey
from shared.worker.tickets import TicketTable

_SECRET_BYTES = 32
_COMMIT_ANSWER_S = 0.4
_RETRY_AFTER_S = 1.0
_REPLAY_TOKENS = 1024
"""Tokens in one answer: with logprobs more would not fit a message. The gateway asks again."""


@dataclass
class DecodeDesk:
    """Owns the table of D's tickets. `start` subscribes; the tickets' coroutines belong to the service."""

    deps: Deps
    engine: Engine
    link: Link
    settings: flow.DecodeFlowSettings = field(default_factory=flow.DecodeFlowSettings)

    def __post_init__(self) -> None:
        self.tickets: TicketTable[LiveTicket] = TicketTable(self.deps.clock, self.deps.counters)
        self.logs: Tombstones[tuple[TokenEntry, ...]] = Tombstones(self.deps.clock, capacity=128, keep_s=30.0)
        self.outbox = TokenOutbox(self.deps, self.tickets.find)
        self.draining = False
        self._flow = flow.DecodeFlow(self.deps, self.engine, self.link, self.outbox, self.settings)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        bus, peer, counters = self.deps.bus, self.deps.peer, self.deps.counters
        self._subscriptions = [
            await listen(bus, "decode", peer, subjects.RESERVE, Reserve, self.on_reserve, counters),
            await listen(bus, "decode", peer, subjects.COMMIT, Commit, self.on_commit, counters),
            await listen(bus, "decode", peer, subjects.REPLAY, Replay, self.on_replay, counters),
            await listen(bus, "decode", peer, subjects.CANCEL, Cancel, self.on_cancel, counters),
            await listen(bus, "decode", peer, subjects.FAIL, Fail, self.on_fail, counters),
        ]
        self.deps.spawn_vital(self.outbox.run(), "token-outbox")

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    async def on_reserve(self, order: Reserve) -> Verdict:
        """Takes the pages, all or nothing, and starts the ticket. Asked again, it says the same again."""
        if self.tickets.find(TicketKey(order.room, order.generation)) is not None:
            return Verdict(ok=True)
        if (cause := self.tickets.end_of(order)) is not None:
            if cause.code == FINISHED:  # our yes got lost, and all is done meanwhile
                return Verdict(ok=True)
            return _no(cause.code if cause.failed else "dead_room", cause.message or "that ticket has ended")
        if self.draining:
            return Verdict(
                ok=False, code="ticket_denied", message="this worker is draining", retry_after_s=_RETRY_AFTER_S
            )
        if order.identity != self.engine.identity:
            return _no("identity_mismatch", f"this worker serves {self.engine.identity}")
        ticket = LiveTicket(order, self.deps.clock, self.deps.counters, secrets.token_bytes(_SECRET_BYTES))
        try:
            self.engine.reserve(ticket.key, order.prompt, order.sampling, decodes=True)
        except BatonError as error:
            return _no(error.code, error.message)
        self.tickets.add(ticket)
        ticket.perform = lambda effect: flow.perform(self._flow, ticket, effect)
        self.deps.counters.add("tickets_granted")
        self.deps.spawn(self._serve(ticket), f"ticket-{ticket.key.room}")
        self.deps.changed()
        return Verdict(ok=True)

    async def _serve(self, ticket: LiveTicket) -> None:
        try:
            await flow.serve_ticket(self._flow, ticket)
        finally:
            cause = ticket.state.cause or Cause(FINISHED)
            self.logs.put(ticket.key.room, tuple(ticket.entry(c, 0) for c in range(len(ticket.choices))))
            self.tickets.drop(ticket, cause)
            self.deps.counters.add(f"tickets_{cause.code}")
            self.deps.changed()

    async def on_commit(self, record: Commit) -> CommitReply:
        """Completes the ticket's wait and answers once D has decided; *pending* means: ask again."""
        ticket = self.tickets.addressed(record)
        if ticket is None:
            cause = self.tickets.end_of(record)
            if cause is not None and cause.code == FINISHED:
                return CommitReply(status=CommitStatus.COMMITTED)
            return CommitReply(status=CommitStatus.DEAD, code="dead_room", message=cause.message if cause else "")
        if not ticket.record.done():
            ticket.record.set_result(record)
        done, _ = await asyncio.wait({ticket.commit_answer}, timeout=_COMMIT_ANSWER_S)
        return ticket.commit_answer.result() if done else CommitReply(status=CommitStatus.PENDING)

    async def on_replay(self, wanted: Replay) -> ReplayReply:
        """Tokens from k, of a live ticket or of one that ended a short while ago."""
        ticket = self.tickets.addressed(wanted)
        if ticket is not None:
            status, entries = ReplayStatus.LIVE, tuple(ticket.entry(c, 0) for c in range(len(ticket.choices)))
        else:
            status, entries = ReplayStatus.ENDED, self.logs.get(wanted.room) or ()
            if not entries or entries[0].generation != wanted.generation:
                return ReplayReply(status=ReplayStatus.UNKNOWN)
        each = max(1, _REPLAY_TOKENS // max(1, len(wanted.wanted)))
        parts = tuple(_cut(entries[c], k, k + each) for c, k in wanted.wanted if c < len(entries))
        return ReplayReply(status=status, entries=parts)

    async def on_cancel(self, order: Cancel) -> Verdict:
        """Ends a ticket or one of its choices. Of an unknown ticket a tombstone stays: it can never begin."""
        ticket = self.tickets.addressed(order)
        if ticket is None:
            self.tickets.bury(order, Cause(CANCELLED, order.reason, by="gateway"))
        elif order.choice is None:
            ticket.apply(machine.Ended(order.generation, Cause(CANCELLED, order.reason, by="gateway")))
        elif ticket.stop_choice(order.choice):
            self.engine.finish_choice(ticket.key, order.choice)
        return Verdict(ok=True)

    async def on_fail(self, notice: Fail) -> Verdict:
        """P gave the ticket up."""
        ticket = self.tickets.addressed(notice)
        if ticket is not None and not ticket.state.committed:  # after that P has no part in it any more
            ticket.apply(machine.Ended(notice.generation, Cause(notice.code, notice.message, by="prefill")))
        return Verdict(ok=True)

    def __len__(self) -> int:
        return len(self.tickets)

    def gateways(self) -> set[str]:
        """Those that wait for a live ticket of ours."""
        return {ticket.order.gateway for ticket in self.tickets}

    def end_all_of(self, gateway: str) -> None:
        """That gateway is gone: nobody waits for these tokens any more."""
        for ticket in self.tickets:
            if ticket.order.gateway == gateway:
                ticket.apply(
                    machine.Ended(ticket.key.generation, Cause("peer_lost", "the gateway is gone", by="gateway"))
                )

    def end_unstarted(self, reason: str) -> None:
        """The sidecar restarted: what it had not finished receiving is lost."""
        for ticket in self.tickets:
            if ticket.state.remote and not ticket.state.committed:
                ticket.apply(machine.Ended(ticket.key.generation, Cause("peer_lost", reason, by="decode")))

    def states(self) -> dict[str, int]:
        """How many tickets are in each state."""
        counts: dict[str, int] = {}
        for ticket in self.tickets:
            counts[ticket.state.state.value] = counts.get(ticket.state.state.value, 0) + 1
        return counts


def _no(code: str, message: str) -> Verdict:
    return Verdict(ok=False, code=code, message=message, retry_after_s=_RETRY_AFTER_S)


def _cut(entry: TokenEntry, start: int, end: int) -> TokenEntry:
    """Tokens [start, end) of an entry that begins at 0; the finish belongs to the last token of all."""
    finish = entry.finish if end >= len(entry.tokens) else None
    part = {"index": start, "tokens": entry.tokens[start:end], "logprobs": entry.logprobs[start:end], "finish": finish}
    return entry.model_copy(update=part)
