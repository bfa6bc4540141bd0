"""P waits for D's word where the state goes, and asks D in silence."""

import asyncio

from services.prefill.parts import PrefillFlow
from services.prefill.ticket import PrefillTicket
from shared.bus.ask import ask
from shared.protocol import subjects
from shared.protocol.messages import Destination, Replay, ReplayReply, ReplayStatus
from shared.runtime.errors import BatonError, DeadlineExceeded, PeerLost, UnknownRoom


async def await_destination(p: PrefillFlow, ticket: PrefillTicket) -> Destination:
    """Waits for D's word where the state goes. In silence it asks D whether the ticket lives there, rather than guess;
    pages that are held meanwhile are held for a ticket that somebody still wants."""
    unknown = 0
    while True:
        await asyncio.wait({ticket.destination}, timeout=p.settings.probe_s)
        if ticket.destination.done():
            return ticket.destination.result()
        disconnects = p.deps.bus.stats.disconnects
        status = await _status_at_decode(p, ticket)
        if status is None and was_deaf(p, disconnects):
            continue
        unknown += status is ReplayStatus.UNKNOWN
        gone = status is None or status is ReplayStatus.ENDED or unknown > p.settings.unknown_asks
        if gone and not ticket.destination.done():
            raise by_decode(
                PeerLost("decode does not answer")
                if status is None
                else UnknownRoom("decode does not hold this ticket")
            )


def by_decode(error: BatonError) -> BatonError:
    error.by = "decode"
    return error


def was_deaf(p: PrefillFlow, disconnects: int) -> bool:
    """Whether silence since that count of disconnects says nothing about a peer: nobody could be heard."""
    return not p.deps.bus.connected or p.deps.bus.stats.disconnects != disconnects


async def _status_at_decode(p: PrefillFlow, ticket: PrefillTicket) -> ReplayStatus | None:
    """What D knows of the ticket; None where it does not answer."""
    where = subjects.subject("decode", ticket.order.decode, subjects.REPLAY)
    question = Replay(room=ticket.key.room, generation=ticket.key.generation, wanted=())
    deadline = p.deps.clock.now() + p.settings.answer_s
    try:
        reply = await ask(p.deps.bus, p.deps.clock, where, question, ReplayReply, deadline=deadline)
    except (PeerLost, DeadlineExceeded):
        return None
    return reply.status
