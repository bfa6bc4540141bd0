"""The life of a ticket on P: its pages are pinned from acceptance until D has taken over or the ticket ended.

    WAITING     accepted, D's destination is not here yet                     nothing is computed, nothing is sent
    COMPUTING   the destination is here; chunks are computed and sent         pinned: engine writes, sidecar reads
    COMMITTING  all bytes are confirmed; the commit record is repeated        pinned until D's word
    RELEASING   ended, but a step or the sidecar may still touch the pages    owner: quarantine
    RELEASED    proven quiet                                                  owner: the pool

Optimistic prefill (a setting) computes before the destination is here, and sends nothing:

    AHEAD       is being computed; gives way to whoever needs its pages       owner: the ticket, until then
    PARKED      computed                                                      owner: the ticket, until then
    YIELDED     gave its pages up; its state is in host memory, or dropped    owner: nobody (a step that copies)
    RETURNING   the destination is here; waits for pages                      owner: nobody (a step that copies)

Invariants: no byte leaves before the destination is here; pages of a ticket whose destination is here come free only
through RELEASING and its proof (`Quiesced`), those of others also when the engine has taken them back; the first cause
of the end is kept; an event of another generation changes nothing.
"""

from dataclasses import dataclass, replace
from enum import Enum

from shared.machines.stepping import FINISHED, Cause, Ended, Event, Outcome, Quiesced, Step, TellGateway, next_state


class PrefillState(Enum):
    WAITING = "waiting"
    AHEAD = "ahead"
    PARKED = "parked"
    YIELDED = "yielded"
    RETURNING = "returning"
    COMPUTING = "computing"
    COMMITTING = "committing"
    RELEASING = "releasing"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class DestinationArrived(Event):
    """D told where the state goes."""


@dataclass(frozen=True, slots=True)
class BegunAhead(Event):
    """The engine may compute, though the destination is not here."""


@dataclass(frozen=True, slots=True)
class ComputedAhead(Event):
    """The whole prompt is."""


@dataclass(frozen=True, slots=True)
class Yielded(Event):
    """The engine took the pages for somebody else."""


@dataclass(frozen=True, slots=True)
class Returned(Event):
    """It has pages again."""


@dataclass(frozen=True, slots=True)
class AllSent(Event):
    """The prompt is computed and D's sidecar confirmed every byte (none, if the handoff token ended the request)."""


@dataclass(frozen=True, slots=True)
class CommitAnswered(Event):
    """D has taken over."""


@dataclass(frozen=True, slots=True)
class Unpin:
    """Forget the ticket at the sidecar and retire the group, then report Quiesced."""


@dataclass(frozen=True, slots=True)
class TellDecode:
    """D must not wait any longer."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class PrefillTicket:
    """A ticket as P sees it."""

    room: int
    generation: int
    state: PrefillState = PrefillState.WAITING
    cause: Cause | None = None


TERMINAL = frozenset({PrefillState.RELEASED})

_S = PrefillState
TRANSITIONS: dict[tuple[PrefillState, type[Event]], PrefillState] = {
    (_S.WAITING, DestinationArrived): _S.COMPUTING,
    (_S.WAITING, BegunAhead): _S.AHEAD,
    (_S.WAITING, Ended): _S.RELEASING,
    (_S.AHEAD, DestinationArrived): _S.COMPUTING,
    (_S.AHEAD, ComputedAhead): _S.PARKED,
    (_S.AHEAD, Yielded): _S.YIELDED,
    (_S.AHEAD, Ended): _S.RELEASING,
    (_S.PARKED, DestinationArrived): _S.COMPUTING,
    (_S.PARKED, Yielded): _S.YIELDED,
    (_S.PARKED, Ended): _S.RELEASING,
    (_S.YIELDED, DestinationArrived): _S.RETURNING,
    (_S.YIELDED, Returned): _S.AHEAD,
    (_S.YIELDED, Ended): _S.RELEASING,
    (_S.RETURNING, DestinationArrived): _S.RETURNING,
    (_S.RETURNING, Returned): _S.COMPUTING,
    (_S.RETURNING, Ended): _S.RELEASING,
    # The engine decides before it has heard that the destination is here.
    (_S.COMPUTING, ComputedAhead): _S.COMPUTING,
    (_S.COMPUTING, Yielded): _S.RETURNING,
    (_S.COMPUTING, DestinationArrived): _S.COMPUTING,
    (_S.COMPUTING, AllSent): _S.COMMITTING,
    (_S.COMPUTING, Ended): _S.RELEASING,
    (_S.COMMITTING, DestinationArrived): _S.COMMITTING,
    (_S.COMMITTING, CommitAnswered): _S.RELEASING,
    (_S.COMMITTING, Ended): _S.RELEASING,
    (_S.RELEASING, DestinationArrived): _S.RELEASING,
    (_S.RELEASING, ComputedAhead): _S.RELEASING,
    (_S.RELEASING, Yielded): _S.RELEASING,
    (_S.RELEASING, Returned): _S.RELEASING,
    (_S.RELEASING, AllSent): _S.RELEASING,
    (_S.RELEASING, CommitAnswered): _S.RELEASING,
    (_S.RELEASING, Ended): _S.RELEASING,
    (_S.RELEASING, Quiesced): _S.RELEASED,
}


def step(ticket: PrefillTicket, event: Event) -> Step[PrefillTicket]:
    """The one checked function through which every change of a P ticket goes."""
    state, outcome = next_state(TRANSITIONS, TERMINAL, ticket.state, ticket.generation, event)
    if outcome is not Outcome.APPLIED:
        return Step(ticket, outcome=outcome)
    if state is ticket.state:  # a repeat: nothing to do again
        return Step(ticket)
    moved = replace(ticket, state=state)
    match event:
        case CommitAnswered():
            return Step(replace(moved, cause=Cause(FINISHED)), (Unpin(),))
        case Ended(cause=cause):
            return Step(replace(moved, cause=cause), (Unpin(), *_notices(ticket, cause)))
        case _:
            return Step(moved)


def _notices(ticket: PrefillTicket, cause: Cause) -> tuple[TellDecode | TellGateway, ...]:
    """Failures fan out both ways, but never back to the leg they came from. Once all was sent D has what it needs, and
    whether the request goes on is for D alone to say."""
    notices: list[TellDecode | TellGateway] = []
    if cause.by != "decode":
        notices.append(TellDecode(cause))
    if cause.failed and cause.by != "gateway" and ticket.state is not PrefillState.COMMITTING:
        notices.append(TellGateway(cause))
    return tuple(notices)
