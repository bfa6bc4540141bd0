"""What the front desks of both worker roles share: admission, the life of a ticket's coroutine, and who is gone."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

from shared.bus.base import Subscription
from shared.bus.listen import listen
from shared.engine.api import Engine
from shared.machines.stepping import CANCELLED, FINISHED, Cause
from shared.protocol.messages import Cancel, Prefill, Reserve, Verdict, WireModel
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError
from shared.transfer.link import Link, TicketKey
from shared.worker.tickets import LiveTicket, TicketTable

_RETRY_AFTER_S = 1.0

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
        for verb, (kind, handle) in self.handlers().items():
            self._subscriptions.append(
                await listen(self.deps.bus, self.role, self.deps.peer, verb, kind, handle, self.deps.counters)
            )

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    def __len__(self) -> int:
        return len(self.tickets)

    def admit(self, order: Reserve | Prefill, make: Callable[[], T], *, decodes: bool) -> Verdict:
        """Takes the pages, all or nothing, and starts the ticket. Asked again, it says the same again."""
        if self.tickets.find(TicketKey(order.room, order.generation)) is not None:
            return Verdict(ok=True)
        if (cause := self.tickets.end_of(order)) is not None:
            if cause.code == FINISHED:  # our yes got lost, and all is done meanwhile
                return Verdict(ok=True)
            return _no(code_of(cause), cause.message or "that ticket has ended")
        if self.draining:
            return _no("ticket_denied", "this worker is draining")
        if order.identity != self.engine.identity:
            return _no("identity_mismatch", f"this worker serves {self.engine.identity}")
        ticket = make()
        try:
            self.engine.reserve(ticket.key, order.prompt, order.sampling, decodes=decodes)
        except BatonError as error:
            return _no(error.code, error.message)
        self.tickets.add(ticket)
        ticket.perform = lambda effect: self.perform(ticket, effect)
        self.deps.counters.add("tickets_granted")
        self.deps.spawn(self._serve(ticket), f"ticket-{ticket.key.room}")
        self.deps.changed()
        return Verdict(ok=True)

    async def _serve(self, ticket: T) -> None:
        try:
            await self.serve(ticket)
        finally:
            cause: Cause = ticket.state.cause or Cause(FINISHED)
            self.tickets.drop(ticket, cause)
            self.deps.counters.add(f"tickets_{cause.code}")
            self.deps.changed()

    async def on_cancel(self, order: Cancel) -> Verdict:
        """Ends a ticket. Of an unknown one a tombstone stays: it can never begin."""
        ticket = self.tickets.addressed(order)
        if ticket is None:
            self.tickets.bury(order, Cause(CANCELLED, order.reason, by="gateway"))
        elif order.choice is None:
            ticket.end(CANCELLED, order.reason, by="gateway")
        return Verdict(ok=True)

    def gateways(self) -> set[str]:
        """Those that wait for a live ticket of ours."""
        return {ticket.order.gateway for ticket in self.tickets}

    def end_all_of(self, gateway: str) -> None:
        """That gateway is gone: nobody waits for these tickets any more."""
        for ticket in self.tickets:
            if ticket.order.gateway == gateway:
                ticket.end("peer_lost", "the gateway is gone", by="gateway")

    @abstractmethod
    def end_unstarted(self, reason: str) -> None:
        """The sidecar restarted: what it had under way is lost."""


def code_of(cause: Cause) -> str:
    """What to answer about a ticket that ended so."""
    return cause.code if cause.failed else "dead_room"


def _no(code: str, message: str) -> Verdict:
    return Verdict(ok=False, code=code, message=message, retry_after_s=_RETRY_AFTER_S)
