"""The worker's front desk: the table of live tickets and what is remembered of ended ones.

Both worker roles use it. A message for an unknown or older ticket is counted and answered, never raised, and never
brings anything back to life.
"""

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from shared.machines.stepping import Cause
from shared.protocol.messages import TicketMessage
from shared.runtime.clock import Clock
from shared.runtime.counters import Counters
from shared.runtime.tombstones import Tombstones
from shared.transfer.link import TicketKey


class HasKey(Protocol):
    @property
    def key(self) -> TicketKey: ...


T = TypeVar("T", bound=HasKey)


class TicketTable(Generic[T]):
    """room -> live ticket, and (generation, cause) of the ended ones."""

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._live: dict[int, T] = {}
        self.ended: Tombstones[tuple[int, Cause]] = Tombstones(clock)
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
        """Remembers the end of a ticket that never lived here, so that it cannot begin later."""
        if message.room not in self._live and self.end_of(message) is None:
            self.ended.put(message.room, (message.generation, cause))

    def end_of(self, message: TicketMessage) -> Cause | None:
        """Why the ticket of this message ended, if it did."""
        entry = self.ended.get(message.room)
        return None if entry is None or entry[0] != message.generation else entry[1]
