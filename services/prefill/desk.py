"""P's front desk: what arrives over NATS becomes a ticket, an event of a ticket, or a counted no-op."""

import asyncio
from dataclasses import dataclass, field

from services.prefill import flow
from services.prefill.ticket import LiveTicket
from shared.bus.base import Subscription
from shared.bus.listen import listen
from shared.engine.api import Engine
from shared.machines import prefill as machine
from shared.machines.stepping import CANCELLED, FINISHED, Cause
from shared.protocol import subjects
from shared.protocol.messages import (
    Cancel,
    Destination,
    DestinationReply,
    DestinationStatus,
    Fail,
    Prefill,
    Verdict,
)
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError
from shared.transfer.link import Link, TicketKey
from shared.worker.tickets import TicketTable

_EARLY_HOLD_S = 0.4
_EARLY_LIMIT = 256
_RETRY_AFTER_S = 1.0


@dataclass
class PrefillDesk:
    """Owns the table of P's tickets. `start` subscribes; the tickets' coroutines belong to the service."""

    deps: Deps
    engine: Engine
    link: Link
    settings: flow.PrefillFlowSettings = field(default_factory=flow.PrefillFlowSettings)

    def __post_init__(self) -> None:
        self.tickets: TicketTable[LiveTicket] = TicketTable(self.deps.clock, self.deps.counters)
        self.draining = False
        self._arrived: dict[int, asyncio.Event] = {}
        self._flow = flow.PrefillFlow(self.deps, self.engine, self.link, self.settings)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        bus, peer, counters = self.deps.bus, self.deps.peer, self.deps.counters
        self._subscriptions = [
            await listen(bus, "prefill", peer, subjects.PREFILL, Prefill, self.on_prefill, counters),
            await listen(bus, "prefill", peer, subjects.DESTINATION, Destination, self.on_destination, counters),
            await listen(bus, "prefill", peer, subjects.CANCEL, Cancel, self.on_cancel, counters),
            await listen(bus, "prefill", peer, subjects.FAIL, Fail, self.on_fail, counters),
        ]

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    async def on_prefill(self, order: Prefill) -> Verdict:
        """Takes the prompt's pages and starts the ticket. Asked again, it says the same again."""
        if self.tickets.find(TicketKey(order.room, order.generation)) is not None:
            return Verdict(ok=True)
        if (cause := self.tickets.end_of(order)) is not None:
            if cause.code == FINISHED:  # our yes got lost, and all is done meanwhile
                return Verdict(ok=True)
            return _no(_code(cause), cause.message or "that ticket has ended")
        if self.draining:
            return _no("overloaded", "this worker is draining")
        if order.identity != self.engine.identity:
            return _no("identity_mismatch", f"this worker serves {self.engine.identity}")
        ticket = LiveTicket(order, self.deps.clock, self.deps.counters)
        try:
            self.engine.reserve(ticket.key, order.prompt, order.sampling, decodes=False)
        except BatonError as error:
            return _no(error.code, error.message)
        self.tickets.add(ticket)
        ticket.perform = lambda effect: flow.perform(self._flow, ticket, effect)
        self.deps.counters.add("tickets_accepted")
        self.deps.spawn(self._serve(ticket), f"ticket-{ticket.key.room}")
        if (waiting := self._arrived.pop(order.room, None)) is not None:
            waiting.set()
        self.deps.changed()
        return Verdict(ok=True)

    async def _serve(self, ticket: LiveTicket) -> None:
        try:
            await flow.serve_ticket(self._flow, ticket)
        finally:
            cause = ticket.state.cause or Cause(FINISHED)
            self.tickets.drop(ticket, cause)
            self.deps.counters.add(f"tickets_{cause.code}")
            self.deps.changed()

    async def on_destination(self, destination: Destination) -> DestinationReply:
        """Where the state goes. May come before the prompt (NATS does not order two publishers): then it is held for a
        moment. It is repeated, also to ask whether the ticket still lives here."""
        room, generation = destination.room, destination.generation
        ticket = self.tickets.addressed(destination)
        if ticket is None and self.tickets.end_of(destination) is None:
            await self._hold(room)
            ticket = self.tickets.addressed(destination)
        if ticket is None:
            if (cause := self.tickets.end_of(destination)) is not None:
                return DestinationReply(status=DestinationStatus.DEAD, code=_code(cause), message=cause.message)
            return DestinationReply(status=DestinationStatus.UNKNOWN)
        if ticket.state.cause is not None:
            cause = ticket.state.cause
            return DestinationReply(status=DestinationStatus.DEAD, code=_code(cause), message=cause.message)
        refusal = self._refusal(destination)
        if refusal is not None:
            cause = Cause("identity_mismatch", refusal, by="prefill")
            ticket.apply(machine.Ended(generation, cause))
            return DestinationReply(status=DestinationStatus.REFUSED, code=cause.code, message=refusal)
        ticket.apply(machine.DestinationArrived(generation))
        if not ticket.destination.done():
            ticket.destination.set_result(destination)
        return DestinationReply(status=DestinationStatus.ACCEPTED)

    async def _hold(self, room: int) -> None:
        """Waits a moment for a room nobody has heard of yet; the number of those is bounded."""
        if len(self._arrived) >= _EARLY_LIMIT:
            self.deps.counters.add("early_destinations_refused")
            return
        arrived = self._arrived.setdefault(room, asyncio.Event())
        try:
            async with asyncio.timeout(_EARLY_HOLD_S):
                await arrived.wait()
        except TimeoutError:
            self.deps.counters.add("early_destinations_unknown")
        finally:
            self._arrived.pop(room, None)

    def _refusal(self, destination: Destination) -> str | None:
        """Why these two workers cannot hand over, naming what differs; None where they can."""
        if destination.identity != self.engine.identity:
            return f"prefill holds {self.engine.identity}, decode holds {destination.identity}"
        ours, theirs = self.engine.geometry, destination.geometry
        if ours.page_tokens != theirs.page_tokens:
            return f"page_tokens differ: prefill {ours.page_tokens}, decode {theirs.page_tokens}"
        if ours != theirs:
            return f"state components differ: prefill {ours}, decode {theirs}"
        return None

    async def on_cancel(self, order: Cancel) -> Verdict:
        """Ends a ticket. Of an unknown one a tombstone stays: it can never begin."""
        cause = Cause(CANCELLED, order.reason, by="gateway")
        ticket = self.tickets.addressed(order)
        if ticket is None:
            self.tickets.bury(order, cause)
        elif order.choice is None:
            ticket.apply(machine.Ended(order.generation, cause))
        return Verdict(ok=True)

    async def on_fail(self, notice: Fail) -> Verdict:
        """D gave the ticket up."""
        if (ticket := self.tickets.addressed(notice)) is not None:
            ticket.apply(machine.Ended(notice.generation, Cause(notice.code, notice.message, by="decode")))
        return Verdict(ok=True)

    def __len__(self) -> int:
        return len(self.tickets)

    def gateways(self) -> set[str]:
        """Those that wait for a live ticket of ours."""
        return {ticket.order.gateway for ticket in self.tickets}

    def end_all_of(self, gateway: str) -> None:
        """That gateway is gone: nobody waits for this prompt any more."""
        for ticket in self.tickets:
            if ticket.order.gateway == gateway:
                ticket.apply(
                    machine.Ended(ticket.key.generation, Cause("peer_lost", "the gateway is gone", by="gateway"))
                )

    def end_unstarted(self, reason: str) -> None:
        """The sidecar restarted: what it was sending is lost."""
        for ticket in self.tickets:
            if ticket.state.state is not machine.PrefillState.COMMITTING:  # its bytes are confirmed
                ticket.apply(machine.Ended(ticket.key.generation, Cause("peer_lost", reason, by="prefill")))

    def states(self) -> dict[str, int]:
        """How many tickets are in each state."""
        counts: dict[str, int] = {}
        for ticket in self.tickets:
            counts[ticket.state.state.value] = counts.get(ticket.state.state.value, 0) + 1
        return counts


def _code(cause: Cause) -> str:
    return cause.code if cause.failed else "dead_room"


def _no(code: str, message: str) -> Verdict:
    return Verdict(ok=False, code=code, message=message, retry_after_s=_RETRY_AFTER_S)
