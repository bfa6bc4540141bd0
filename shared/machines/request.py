"""The life of one attempt of a request at the gateway. The attempt's number is the ticket's generation.

    ROUTING    waiting for workers with capacity; nobody holds anything      leaves by: workers chosen · end
    GRANTING   reserve is out to D and prefill to P, both at once            leaves by: both granted · refused · end
    WAITING    both legs said yes; no token yet                              leaves by: first token · end
    STREAMING  tokens reach the client                                       leaves by: all choices done · end
    ENDED      every leg was told                                            absorbs

Invariants: from GRANTING on, the end of an attempt tells each leg that has not ended by itself; a token index reaches
the client once. So the attempt after one that failed goes on behind the tokens that the client has, and starts from
scratch only where there are none. Failures count in a row, and an attempt that has emitted begins a new row.
"""

from dataclasses import dataclass, replace
from enum import Enum

from shared.machines.stepping import FINISHED, Cause, Ended, Event, Outcome, Step, next_state


class RequestState(Enum):
    ROUTING = "routing"
    GRANTING = "granting"
    WAITING = "waiting"
    STREAMING = "streaming"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class WorkersChosen(Event):
    """A D, and for the remote path a P, were picked."""


@dataclass(frozen=True, slots=True)
class Granted(Event):
    """Every leg accepted."""


@dataclass(frozen=True, slots=True)
class TokensArrived(Event):
    """The next expected token of some choice came."""


@dataclass(frozen=True, slots=True)
class AllDone(Event):
    """Every choice finished, or was stopped by the text side."""


@dataclass(frozen=True, slots=True)
class CancelLegs:
    """Tell each leg that may still hold something that the attempt is over."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt. emitted: tokens of it have reached the client."""

    room: int
    generation: int
    state: RequestState = RequestState.ROUTING
    cause: Cause | None = None
    emitted: bool = False


TERMINAL = frozenset({RequestState.ENDED})

_S = RequestState
TRANSITIONS: dict[tuple[RequestState, type[Event]], RequestState] = {
    (_S.ROUTING, WorkersChosen): _S.GRANTING,
    (_S.ROUTING, Ended): _S.ENDED,
    (_S.GRANTING, Granted): _S.WAITING,
    (_S.GRANTING, TokensArrived): _S.STREAMING,  # P may be quicker than D's answer
    (_S.GRANTING, AllDone): _S.ENDED,
    (_S.GRANTING, Ended): _S.ENDED,
    (_S.WAITING, TokensArrived): _S.STREAMING,
    (_S.WAITING, AllDone): _S.ENDED,
    (_S.WAITING, Ended): _S.ENDED,
    (_S.STREAMING, Granted): _S.STREAMING,
    (_S.STREAMING, TokensArrived): _S.STREAMING,
    (_S.STREAMING, AllDone): _S.ENDED,
    (_S.STREAMING, Ended): _S.ENDED,
}


def step(attempt: Attempt, event: Event) -> Step[Attempt]:
    """The one checked function through which every change of an attempt goes."""
    state, outcome = next_state(TRANSITIONS, TERMINAL, attempt.state, attempt.generation, event)
    if outcome is not Outcome.APPLIED:
        return Step(attempt, outcome=outcome)
    moved = replace(attempt, state=state)
    match event:
        case TokensArrived():
            return Step(replace(moved, emitted=True))
        case AllDone():
            return Step(replace(moved, cause=Cause(FINISHED)), (CancelLegs(),))
        case Ended(cause=cause):
            effects = () if attempt.state is RequestState.ROUTING else (CancelLegs(),)
            return Step(replace(moved, cause=cause), effects)
        case _:
            return Step(moved)
