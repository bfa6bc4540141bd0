"""D's front desk: what arrives over NATS becomes a ticket, an event of a ticket, or a counted no-op."""

import asyncio
import secrets

from services.decode import flow
from services.decode.loop import TokenOutbox
from services.decode.ticket import DecodeTicket
from shared.engine.api import Engine
from shared.machines.stepping import FINISHED, Cause
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
from shared.protocol.wire import WireModel
from shared.runtime.deps import Deps
from shared.runtime.tombstones import Tombstones
from shared.transfer.link import Link
from shared.worker.desk import Handler, WorkerDesk
from shared.worker.stores import Stores

_SECRET_BYTES = 32
_COMMIT_ANSWER_S = 0.4
_REPLAY_TOKENS = 1024
"""Tokens in one answer: with logprobs more would not fit a message. The gateway asks again."""


class DecodeDesk(WorkerDesk[DecodeTicket]):
    """logs: the tokens of tickets that ended a short while ago, for replays. outbox: the engine's listener."""

    role = "decode"

    def __init__(self, deps: Deps, engine: Engine, link: Link, stores: Stores | None = None) -> None:
        super().__init__(deps, engine, link)
        self.logs: Tombstones[tuple[TokenEntry, ...]] = Tombstones(deps.clock, capacity=128, keep_s=30.0)
        self.outbox = TokenOutbox(deps, self.tickets.find, engine.begun_at)
        self._flow = flow.DecodeFlow(deps, engine, link, self.outbox, stores)

    def handlers(self) -> dict[str, tuple[type[WireModel], Handler]]:
        return {
            subjects.RESERVE: (Reserve, self.on_reserve),
            subjects.COMMIT: (Commit, self.on_commit),
            subjects.REPLAY: (Replay, self.on_replay),
            subjects.CANCEL: (Cancel, self.on_cancel),
            subjects.FAIL: (Fail, self.on_fail),
        }

    async def start(self) -> None:
        await super().start()
        self.deps.spawn_vital(self.outbox.run(), "token-outbox")

    async def serve(self, ticket: DecodeTicket) -> None:
        try:
            await flow.serve_ticket(self._flow, ticket)
        finally:
            self.logs.put(ticket.key.room, tuple(ticket.entry(c, 0) for c in range(len(ticket.choices))))

    def perform(self, ticket: DecodeTicket, effect: object) -> None:
        flow.perform(self._flow, ticket, effect)

    async def on_reserve(self, order: Reserve) -> Verdict:
        """Takes pages for the prompt and the first steps of its choices."""
        secret = secrets.token_bytes(_SECRET_BYTES)
        make = lambda: DecodeTicket(order, self.deps.clock, self.deps.counters, secret)  # noqa: E731
        return self.admit(order, make, decodes=True)

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
        if ticket is not None and wanted.gateway is not None:
            self.give_to(ticket, wanted.gateway, wanted.epoch)
        if ticket is not None:
            cause = ticket.state.cause
            entries = tuple(ticket.entry(c, 0) for c in range(len(ticket.choices)))
        else:
            cause, entries = self.tickets.end_of(wanted), self.logs.get(wanted.room) or ()
            if cause is None:
                return ReplayReply(status=ReplayStatus.UNKNOWN)
        each = max(1, _REPLAY_TOKENS // max(1, len(wanted.wanted)))
        parts = tuple(_cut(entries[c], k, each) for c, k in wanted.wanted if c < len(entries))
        if cause is None:
            return ReplayReply(status=ReplayStatus.LIVE, entries=parts)
        if not cause.failed:
            return ReplayReply(status=ReplayStatus.ENDED, entries=parts)
        return ReplayReply(
            status=ReplayStatus.ENDED, entries=parts, code=cause.code, message=cause.message, by=cause.by
        )

    def end_choice(self, ticket: DecodeTicket, choice: int) -> None:
        if ticket.stop_choice(choice):
            self.engine.finish_choice(ticket.key, choice)

    async def on_fail(self, notice: Fail) -> Verdict:
        """P gave the ticket up; once D has taken over P has no part in it any more. What we have not heard of yet can
        never begin."""
        ticket = self.tickets.addressed(notice)
        if ticket is None:
            self.tickets.bury(notice, Cause(notice.code, notice.message, by="prefill"))
        elif not ticket.state.committed:
            ticket.end(notice.code, notice.message, by="prefill")
        return Verdict(ok=True)

    def grace_of(self, ticket: DecodeTicket) -> float:
        """Before its first token there is nothing that another gateway could know it by."""
        return ticket.order.orphan_grace_s if any(choice.tokens for choice in ticket.choices) else 0.0

    def end_unstarted(self, reason: str) -> None:
        for ticket in self.tickets:
            if ticket.state.remote and not ticket.state.committed:
                ticket.end("peer_lost", reason, by="decode")


def _cut(entry: TokenEntry, index: int, count: int) -> TokenEntry:
    """At most `count` tokens of an entry, from token `index` on or from the entry's first; the finish belongs to the
    last token of all."""
    skipped = max(0, index - entry.index)
    end = skipped + count
    part = {
        "index": entry.index + skipped,
        "tokens": entry.tokens[skipped:end],
        "logprobs": entry.logprobs[skipped:end],
        "finish": entry.finish if end >= len(entry.tokens) else None,
    }
    return entry.model_copy(update=part)
