"""What the front desks of both worker roles share: admission, the life of a ticket's coroutine, and who is gone."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

from shared.bus.base import Subscription
from shared.bus.listen import listen
from shared.engine.api import Engine
from shared.machines.stepping import CANCELLED, FINISHED, Cause
from shared.protocol import subjects
from shared.protocol.messages import Cancel, Ping, Prefill, Reserve, Verdict
from shared.protocol.wire import WireModel
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError, PoolExhausted, TicketDenied, error_from_code
from shared.transfer.link import Link, TicketKey
from shared.worker.admission import Claims, Need
from shared.worker.roll_call import RollCalls
from shared.worker.tickets import LiveTicket, Orphaned, TicketTable

_RETRY_AFTER_S = 1.0
_SAME_LOSS_S = 10.0
"""A gateway that is still gone is said to be so again within this."""
_NO_ROOM = (PoolExhausted.code, TicketDenied.code)
"""Reasons of a cancel after which the request asks again."""

T = TypeVar("T", bound=LiveTicket[Any, Any])
Handler = Callable[[Any], Awaitable[WireModel | None]]


class WorkerDesk(ABC, Generic[T]):
    """Owns the table of a worker's tickets. `start` subscribes; the tickets' coroutines belong to the service."""

    role: ClassVar[str]

    def __init__(self, deps: Deps, engine: Engine, link: Link) -> None:
        self.deps = deps
        self.engine = engine
        self.link = link
        self.tickets: TicketTable[T] = TicketTable(deps.clock, deps.counters)
        self.claims = Claims()
        self.draining = False
        self._subscriptions: list[Subscription] = []

    @abstractmethod
    def handlers(self) -> dict[str, tuple[type[WireModel], Handler]]:
        """verb -> what comes there, and who takes it."""

    @abstractmethod
    async def serve(self, ticket: T) -> None:
        """The ticket's coroutine; returns when its pages are free."""

    @abstractmethod
    def perform(self, ticket: T, effect: object) -> None:
        """Carries out an effect of the ticket's machine."""

    async def start(self) -> None:
        handlers = self.handlers() | {subjects.PING: (Ping, self.on_ping)}
        for verb, (kind, handle) in handlers.items():
            self._subscriptions.append(
                await listen(self.deps.bus, self.role, self.deps.peer, verb, kind, handle, self.deps.counters)
            )

        roll_calls = RollCalls(self.deps, self._rooms_by_gateway, self._end_gone)
        self.deps.spawn_vital(roll_calls.run(), "roll-calls")

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def __len__(self) -> int:
        return len(self.tickets)

    def admit(self, order: Reserve | Prefill, make: Callable[[], T], *, decodes: bool) -> Verdict:
        """Takes the pages, all or nothing, and starts the ticket. Asked again, it says the same again."""
        if self.tickets.find(TicketKey(order.room, order.generation)) is not None:
            self.deps.counters.add("orders_repeated")
            return Verdict(ok=True)
        if (cause := self.tickets.end_of(order)) is not None:
            self.deps.counters.add("orders_repeated")
            if cause.code == FINISHED:  # our yes got lost, and all is done meanwhile
                return Verdict(ok=True)
            return _no(code_of(cause), cause.message or "that ticket has ended", cause.by)
        if self.tickets.is_used(order.room):
            self.deps.counters.add("rooms_reused")
            return _no("stale_generation", "that room belongs to another attempt")
        if self.draining:
            return _no("ticket_denied", "this worker is draining")
        if order.identity != self.engine.identity:
            return _no("identity_mismatch", f"this worker serves {self.engine.identity}, not {order.identity}")
        ticket = make()
        try:
            self._reserve(ticket, decodes)
        except BatonError as error:
            return _no(error.code, error.message)
        self.tickets.add(ticket)
        ticket.perform = lambda effect: self.perform(ticket, effect)
        self.deps.counters.add("tickets_granted")
        self.deps.spawn(self._serve(ticket), f"ticket-{ticket.key.room}")
        self.deps.changed()
        return Verdict(ok=True)

    def _reserve(self, ticket: T, decodes: bool) -> None:
        """Takes the pages in its turn; without room it leaves a claim, and keeps its place when it is asked again."""
        order, now = ticket.order, self.deps.clock.now()
        need = Need(*self.engine.wanted(order.prompt, order.sampling, decodes=decodes, past=ticket.past))
        since = now - order.waited_s
        free = Need(*self.engine.left())
        try:
            self.claims.check(order.request_id, need, since, free, now, order.priority)
            self.engine.reserve(
                ticket.key,
                order.prompt,
                order.sampling,
                decodes=decodes,
                deadline=ticket.deadline,
                priority=order.priority,
                past=ticket.past,
                sharing=ticket.sharing,
            )
        except PoolExhausted:
            self.claims.leave(order.request_id, need, since, now, order.priority)
            raise
        self.claims.entered(order.request_id, since, now, order.priority)
        ticket.need = need

    async def _serve(self, ticket: T) -> None:
        try:
            await self.serve(ticket)
        finally:
            cause: Cause = ticket.state.cause or Cause(FINISHED)
            self.tickets.drop(ticket, cause)
            self.deps.counters.add(f"tickets_{ended_by(cause)}")
            self.deps.changed()

    async def on_cancel(self, order: Cancel) -> Verdict:
        """Ends a ticket, or a choice of it. Of an unknown one a tombstone stays: it can never begin."""
        ticket = self.tickets.addressed(order)
        if ticket is None:
            if order.choice is None:
                self.tickets.bury(order, Cause(CANCELLED, order.reason, by="gateway"))
        elif order.epoch < ticket.epoch:  # another gateway has it now
            self.deps.counters.add("cancels_stale")
        elif order.choice is not None:
            self.end_choice(ticket, order.choice)
        else:
            if order.reason in _NO_ROOM:
                self._return_claim(ticket)
            ticket.end(CANCELLED, order.reason, by="gateway")
        return Verdict(ok=True)

    def end_choice(self, ticket: T, choice: int) -> None:
        """The gateway needs no more of that choice."""

    def _return_claim(self, ticket: T) -> None:
        """The other worker had no room. What was granted here is kept for the request's next try, but only every second
        time: two requests that each hold what the other lacks must not wait for each other for ever."""
        if ticket.key.room % 2:
            now, order = self.deps.clock.now(), ticket.order
            self.claims.leave(order.request_id, ticket.need, ticket.since, now, order.priority)

    async def on_ping(self, _ping: Ping) -> Verdict:
        return Verdict(ok=True)

    def _rooms_by_gateway(self) -> dict[str, list[int]]:
        rooms: dict[str, list[int]] = {}
        for ticket in self.tickets:
            rooms.setdefault(ticket.order.gateway, []).append(ticket.key.room)
        return rooms

    def _end_gone(self, gateway: str, rooms: Iterable[int]) -> None:
        """Their cancels never reached us."""
        gone = set(rooms)
        for ticket in self.tickets:
            if ticket.key.room in gone and ticket.order.gateway == gateway and ticket.state.cause is None:
                self.deps.counters.add("cancels_missed")
                ticket.end(CANCELLED, "the gateway has ended the request", by="gateway")

    def gateways(self) -> set[str]:
        """Those that wait for a live ticket of ours."""
        return {ticket.order.gateway for ticket in self.tickets}

    def end_all_of(self, gateway: str) -> None:
        """That gateway is gone: nobody waits for these tickets any more, but for those that another gateway may still
        take up. It is said again for as long as there are any."""
        for ticket in self.tickets:
            if ticket.order.gateway == gateway and not self._may_be_taken_up(ticket):
                ticket.end("peer_lost", "the gateway is gone", by="gateway")

    def _may_be_taken_up(self, ticket: T) -> bool:
        grace_s, now, orphaned = self.grace_of(ticket), self.deps.clock.now(), ticket.orphaned
        if now - orphaned.said_at > _SAME_LOSS_S:  # it was heard in between, if it was lost before
            orphaned.since = now
        orphaned.said_at = now
        return now - orphaned.since < grace_s

    def grace_of(self, ticket: T) -> float:
        """How long it is kept where its gateway is gone."""
        return 0.0

    def give_to(self, ticket: T, gateway: str, epoch: int) -> None:
        """That gateway waits for it from now on, unless a later one does."""
        if epoch < ticket.epoch:
            self.deps.counters.add("replays_stale")
            return
        ticket.epoch = epoch
        if ticket.order.gateway != gateway:
            ticket.order = ticket.order.model_copy(update={"gateway": gateway})
            ticket.orphaned = Orphaned()
            self.deps.counters.add("tickets_given_over")

    @abstractmethod
    def end_unstarted(self, reason: str) -> None:
        """The sidecar restarted: what it had under way is lost."""


def ended_by(cause: Cause) -> str:
    """A cause's name for counters: codes come from the wire too, and their number is bounded."""
    return error_from_code(cause.code, "").code if cause.failed else cause.code


def code_of(cause: Cause) -> str:
    """What to answer about a ticket that ended so."""
    return cause.code if cause.failed else "dead_room"


def _no(code: str, message: str, by: str = "") -> Verdict:
    return Verdict(ok=False, code=code, message=message, by=by, retry_after_s=_RETRY_AFTER_S)
