"""A worker's live tickets and what is remembered of ended ones.

A message for an unknown or older ticket is counted and answered, never raised, and never brings anything back to life.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from shared.engine.api import NEW, Past
from shared.engine.sharing import Sharing
from shared.machines.stepping import Cause, Ended, Event, Outcome, Step
from shared.protocol.messages import Prefill, Reserve, TicketMessage
from shared.runtime.clock import Clock
from shared.runtime.counters import Counters
from shared.runtime.scope import EndScope
from shared.runtime.tombstones import Tombstones
from shared.transfer.link import TicketKey
from shared.worker.admission import Need


class TicketState(Protocol):
    """A machine's ticket, as far as both roles share it."""

    @property
    def state(self) -> Enum: ...
    @property
    def cause(self) -> Cause | None: ...


O = TypeVar("O", Reserve, Prefill)  # noqa: E741  the order a ticket carries out
S = TypeVar("S", bound=TicketState)


@dataclass(slots=True)
class Orphaned:
    """Since when its gateway is gone, and when that was said last."""

    since: float = float("-inf")
    said_at: float = float("-inf")


class LiveTicket(Generic[O, S]):
    """Belongs to the desk's table from the verdict until its pages are free. past: what its choices have given out
    before, where they go on from there. epoch: of the gateway that has it now; 0: who ordered it. sharing: with whom it
    shares its state. doors: keys under which stores may write into its pages.

    Every change of state goes through `apply`, which steps the machine and hands the effects to `perform`.
    """

    def __init__(
        self, order: O, state: S, step: Callable[[S, Event], Step[S]], clock: Clock, counters: Counters
    ) -> None:
        self.order: O = order
        self.key = TicketKey(order.room, order.generation)
        self.state = state
        self.scope = EndScope()
        self.perform: Callable[[Any], None] = lambda effect: None
        self.granted_at = clock.now()
        self.since = self.granted_at - order.waited_s
        self.deadline = self.granted_at + order.remaining_s
        self.need = Need(0, 0)
        self.past: Past = NEW
        self.epoch = 0
        self.orphaned = Orphaned()
        self.sharing = Sharing()
        self.doors: list[TicketKey] = []
        self._step = step
        self._counters = counters

    def apply(self, event: Event) -> None:
        """Steps the machine. A stale or late event is counted and changes nothing."""
        step = self._step(self.state, event)
        if step.outcome is not Outcome.APPLIED:
            self._counters.add(f"events_{step.outcome.value}")
            return
        self.state = step.ticket
        for effect in step.effects:
            self.perform(effect)

    def end(self, code: str, message: str = "", by: str = "") -> None:
        """Ends the ticket; the first cause is kept."""
        self.apply(Ended(self.key.generation, Cause(code, message, by)))


T = TypeVar("T", bound=LiveTicket[Any, Any])


class TicketTable(Generic[T]):
    """room -> live ticket, and (generation, cause) of the ended ones."""

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._live: dict[int, T] = {}
        self.ended: Tombstones[tuple[int, Cause]] = Tombstones(clock)
        self._stillborn: Tombstones[tuple[int, Cause]] = Tombstones(clock)
        """Apart, because anybody can make these: they must not push out what is known of real ones."""
        self._counters = counters

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._live.values()))

    def add(self, ticket: T) -> None:
        if ticket.key.room in self._live:
            raise ValueError(f"room {ticket.key.room} is taken")
        self._live[ticket.key.room] = ticket

    def drop(self, ticket: T, cause: Cause) -> None:
        """The ticket's pages are free; from now on it is only remembered."""
        del self._live[ticket.key.room]
        self.ended.put(ticket.key.room, (ticket.key.generation, cause))

    def find(self, key: TicketKey) -> T | None:
        ticket = self._live.get(key.room)
        return ticket if ticket is not None and ticket.key == key else None

    def addressed(self, message: TicketMessage) -> T | None:
        """The live ticket a message is for; what is for none is counted."""
        ticket = self.find(TicketKey(message.room, message.generation))
        if ticket is None:
            self._counters.add(f"late_{getattr(message, 'kind', 'message')}")
        return ticket

    def bury(self, message: TicketMessage, cause: Cause) -> None:
        """Remembers the end of a ticket that never lived here, so that it cannot begin later. What is remembered of a
        room already stays: a room is never used twice."""
        if not self.is_used(message.room):
            self._stillborn.put(message.room, (message.generation, cause))

    def is_used(self, room: int) -> bool:
        """Whether the room belongs, or belonged, to a ticket of whatever generation."""
        return room in self._live or self._tombstone(room) is not None

    def end_of(self, message: TicketMessage) -> Cause | None:
        """Why the ticket of this message ended, if it did."""
        entry = self._tombstone(message.room)
        return None if entry is None or entry[0] != message.generation else entry[1]

    def _tombstone(self, room: int) -> tuple[int, Cause] | None:
        return self.ended.get(room) or self._stillborn.get(room)

    def states(self) -> dict[str, int]:
        """How many tickets are in each state."""
        return dict(Counter(str(ticket.state.state.value) for ticket in self))
