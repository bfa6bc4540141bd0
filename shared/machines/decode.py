"""The life of a ticket on D: who owns its pages at every moment.

    RESERVED     pages are taken; once the destination is published P's bytes may come    owner: the ticket
    FILLING      the first bytes, P's or a store's, were announced; the sidecar writes    owner: the ticket
    COMMITTED    record, counts and digests agree; nothing is written any more            owner: the ticket
    STARTED      in the running batch; the engine writes                                  owner: the ticket
    PREEMPTED    gave its pages up: its state is in host memory, or is computed again     owner: nobody (a step copies)
    QUARANTINED  ended, but a step or the sidecar may still touch the pages               owner: quarantine
    FREE         proven quiet                                                             owner: the pool

Invariants: a ticket leaves for FREE only through QUARANTINED and its proof (`Quiesced`); it commits at most once; the
first cause of its end is kept; an event of another generation changes nothing.
"""

from dataclasses import dataclass, replace
from enum import Enum

from shared.machines.stepping import FINISHED, Cause, Ended, Event, Outcome, Quiesced, Step, TellGateway, next_state


class DecodeState(Enum):
    RESERVED = "reserved"
    FILLING = "filling"
    COMMITTED = "committed"
    STARTED = "started"
    PREEMPTED = "preempted"
    QUARANTINED = "quarantined"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class FirstBytes(Event):
    """The sidecar accepted the first transfer of this ticket."""


@dataclass(frozen=True, slots=True)
class CommitMatched(Event):
    """P's record is here and the sidecar's counts and digests agree with it (also with zero pages)."""


@dataclass(frozen=True, slots=True)
class StartedLocally(Event):
    """D computes the prompt itself, or what the stores lack of it (path=local, store): no P, no commit."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The group is in the engine's running batch."""


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """The engine took the group's pages for an older one."""


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """The group has pages again."""


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Put the group into the running batch; its state is complete."""


@dataclass(frozen=True, slots=True)
class AckCommit:
    """Tell P that D has taken over; P unpins its pages."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Fence the sidecar and retire the group, then report Quiesced."""


@dataclass(frozen=True, slots=True)
class TellPrefill:
    """P must stop: this ticket is over."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class DecodeTicket:
    """A ticket as D sees it. `remote`: a P is (or was) to send the state."""

    room: int
    generation: int
    remote: bool
    state: DecodeState = DecodeState.RESERVED
    cause: Cause | None = None
    committed: bool = False


TERMINAL = frozenset({DecodeState.FREE})

_S = DecodeState
TRANSITIONS: dict[tuple[DecodeState, type[Event]], DecodeState] = {
    (_S.RESERVED, FirstBytes): _S.FILLING,
    (_S.RESERVED, CommitMatched): _S.COMMITTED,
    (_S.RESERVED, StartedLocally): _S.STARTED,
    (_S.RESERVED, Ended): _S.QUARANTINED,
    (_S.FILLING, FirstBytes): _S.FILLING,
    (_S.FILLING, CommitMatched): _S.COMMITTED,
    (_S.FILLING, StartedLocally): _S.STARTED,
    (_S.FILLING, Ended): _S.QUARANTINED,
    (_S.COMMITTED, FirstBytes): _S.COMMITTED,
    (_S.COMMITTED, CommitMatched): _S.COMMITTED,
    (_S.COMMITTED, Started): _S.STARTED,
    (_S.COMMITTED, Ended): _S.QUARANTINED,
    (_S.STARTED, FirstBytes): _S.STARTED,
    (_S.STARTED, CommitMatched): _S.STARTED,
    (_S.STARTED, Preempted): _S.PREEMPTED,
    (_S.STARTED, Ended): _S.QUARANTINED,
    (_S.PREEMPTED, FirstBytes): _S.PREEMPTED,
    (_S.PREEMPTED, CommitMatched): _S.PREEMPTED,
    (_S.PREEMPTED, Resumed): _S.STARTED,
    (_S.PREEMPTED, Ended): _S.QUARANTINED,
    (_S.QUARANTINED, FirstBytes): _S.QUARANTINED,
    (_S.QUARANTINED, CommitMatched): _S.QUARANTINED,
    (_S.QUARANTINED, Preempted): _S.QUARANTINED,
    (_S.QUARANTINED, Resumed): _S.QUARANTINED,
    (_S.QUARANTINED, Ended): _S.QUARANTINED,
    (_S.QUARANTINED, Quiesced): _S.FREE,
}


def step(ticket: DecodeTicket, event: Event) -> Step[DecodeTicket]:
    """The one checked function through which every change of a D ticket goes."""
    state, outcome = next_state(TRANSITIONS, TERMINAL, ticket.state, ticket.generation, event)
    if outcome is not Outcome.APPLIED:
        return Step(ticket, outcome=outcome)
    if state is ticket.state:  # a repeat: nothing to do again
        return Step(ticket)
    moved = replace(ticket, state=state)
    match event:
        case CommitMatched():
            return Step(replace(moved, committed=True), (StartGroup(), AckCommit()))
        case Ended(cause=cause):
            return Step(replace(moved, cause=cause), (Quarantine(), *_notices(ticket, cause)))
        case _:
            return Step(moved)


def _notices(ticket: DecodeTicket, cause: Cause) -> tuple[TellPrefill | TellGateway, ...]:
    """Failures fan out both ways, but never back to the leg they came from."""
    notices: list[TellPrefill | TellGateway] = []
    if ticket.remote and not ticket.committed and cause.by != "prefill" and cause.code != FINISHED:
        notices.append(TellPrefill(cause))
    if cause.failed and cause.by != "gateway":
        notices.append(TellGateway(cause))
    return tuple(notices)
