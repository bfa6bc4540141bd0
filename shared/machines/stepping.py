"""What every ticket machine shares: the fence by generation, absorbing ends, and the table look-up. Pure.

The order never changes: (1) an event of another generation is stale and changes nothing, (2) an ended ticket absorbs
everything, (3) the table decides, and a missing cell raises IllegalTransition with the state unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar


class IllegalTransition(Exception):
    """Our own mistake: the table has no cell for this event in this state."""


class Outcome(Enum):
    """What became of an event. STALE and LATE are counted by the caller; they change nothing."""

    APPLIED = "applied"
    STALE = "stale"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one generation of a ticket."""

    generation: int


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a ticket ended: a code of `runtime.errors`, or `finished` / `cancelled`. `by` names the leg to blame."""

    code: str
    message: str = ""
    by: str = ""

    @property
    def failed(self) -> bool:
        return self.code not in (FINISHED, CANCELLED)


FINISHED = "finished"
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Ended(Event):
    """Finished, refused, cancelled, failed or past its deadline."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Quiesced(Event):
    """Proof: no sidecar touches the ticket's pages and no dispatched step uses them."""


@dataclass(frozen=True, slots=True)
class TellGateway:
    """The client's side must learn the first cause."""

    cause: Cause


T = TypeVar("T")
S = TypeVar("S", bound=Enum)


@dataclass(frozen=True, slots=True)
class Step(Generic[T]):
    """The ticket after an event, and what the flow has to do now."""

    ticket: T
    effects: tuple[Any, ...] = ()
    outcome: Outcome = Outcome.APPLIED


def next_state(
    table: Mapping[tuple[S, type[Event]], S], terminal: frozenset[S], state: S, generation: int, event: Event
) -> tuple[S, Outcome]:
    """The state after `event`, and what became of it."""
    if event.generation != generation:
        return state, Outcome.STALE
    if state in terminal:
        return state, Outcome.LATE
    found = table.get((state, type(event)))
    if found is None:
        raise IllegalTransition(f"{type(event).__name__} in {state.name}")
    return found, Outcome.APPLIED
