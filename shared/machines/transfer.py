"""The life of a receiving ticket at a sidecar's door: who may still write its pages.

OPEN      nobody has written yet; its pages belong to the ticket
FILLING   at least one transfer was admitted; `writers` are under way now
FENCING   closed, but `writers` have not stopped; the pages belong to nobody else yet
QUIESCED  no byte will be written any more: the proof that frees the pages

Invariants: a writer enters only in OPEN and FILLING; QUIESCED is reached only with no writer; it absorbs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from shared.machines.stepping import Event, IllegalTransition, Outcome, Step, next_state


class ReceivingState(Enum):
    OPEN = "open"
    FILLING = "filling"
    FENCING = "fencing"
    QUIESCED = "quiesced"


class WriterEntered(Event):
    """A transfer passed every check and is about to write."""


class WriterLeft(Event):
    """A transfer that entered ended, whichever way; its thread writes no more."""


class FenceRequested(Event):
    """The owner wants its pages back."""


@dataclass(frozen=True, slots=True)
class AnnounceFirstBytes:
    """Tell the owner that the first transfer was admitted."""


@dataclass(frozen=True, slots=True)
class StopWriters:
    """Make every transfer under way end soon."""


@dataclass(frozen=True, slots=True)
class ReportQuiesced:
    """Answer all who asked for the fence."""


Effect = AnnounceFirstBytes | StopWriters | ReportQuiesced


@dataclass(frozen=True, slots=True)
class ReceivingTicket:
    generation: int
    state: ReceivingState = ReceivingState.OPEN
    writers: int = 0


TERMINAL = frozenset({ReceivingState.QUIESCED})

TRANSITIONS: Mapping[tuple[ReceivingState, type[Event]], ReceivingState] = {
    (ReceivingState.OPEN, WriterEntered): ReceivingState.FILLING,
    (ReceivingState.OPEN, FenceRequested): ReceivingState.FENCING,
    (ReceivingState.FILLING, WriterEntered): ReceivingState.FILLING,
    (ReceivingState.FILLING, WriterLeft): ReceivingState.FILLING,
    (ReceivingState.FILLING, FenceRequested): ReceivingState.FENCING,
    (ReceivingState.FENCING, WriterLeft): ReceivingState.FENCING,
    (ReceivingState.FENCING, FenceRequested): ReceivingState.FENCING,
}

SETTLED: Mapping[tuple[ReceivingState, bool], ReceivingState] = {
    (ReceivingState.FENCING, False): ReceivingState.QUIESCED,
}
"""Joint rule, applied after each transition: (state, has writers) -> state."""


def may_write(ticket: ReceivingTicket) -> bool:
    """Whether a transfer may enter now."""
    return (ticket.state, WriterEntered) in TRANSITIONS


def step(ticket: ReceivingTicket, event: Event) -> Step[ReceivingTicket]:
    """The ticket after `event`, and what is to be done. Raises IllegalTransition for a row that does not exist."""
    entered, outcome = next_state(TRANSITIONS, TERMINAL, ticket.state, ticket.generation, event)
    if outcome is not Outcome.APPLIED:
        return Step(ticket, outcome=outcome)
    writers = ticket.writers + isinstance(event, WriterEntered) - isinstance(event, WriterLeft)
    if writers < 0:
        raise IllegalTransition(f"{type(event).__name__} in {ticket.state.name} with no writers")
    after = SETTLED.get((entered, writers > 0), entered)
    return Step(ReceivingTicket(ticket.generation, after, writers), _effects(ticket.state, entered, after))


def _effects(before: ReceivingState, entered: ReceivingState, after: ReceivingState) -> tuple[Effect, ...]:
    effects: list[Effect] = []
    if before is ReceivingState.OPEN and entered is ReceivingState.FILLING:
        effects.append(AnnounceFirstBytes())
    if before is not ReceivingState.FENCING and entered is ReceivingState.FENCING:
        effects.append(StopWriters())
    if after is ReceivingState.QUIESCED:
        effects.append(ReportQuiesced())
    return tuple(effects)
