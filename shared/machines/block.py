"""The life of a block in a unit of the kvstore's memory: who may write it, and who may read it.

RESERVED     the unit is taken: a put may come, or the driver will be asked       owner: who fills it
FILLING      bytes come                                                           owner: who fills it
WHOLE        its digest was right and nobody writes any more: readers see it      owner: the index
EVICTING     no reader finds it any more, but `readers` are still inside          owner: quarantine
QUARANTINED  given up while somebody may still write                              owner: quarantine
FREE         proven quiet                                                         owner: the pool

Invariants: a reader enters in WHOLE only, so it sees the whole block or none; from EVICTING a unit comes free with the
last reader, from QUARANTINED with the proof that nobody writes (`Quiesced`); the generation is that of the unit's
present use, so what is late for an earlier one changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from shared.machines.stepping import Cause, Ended, Event, IllegalTransition, Outcome, Quiesced, Step, next_state


class BlockState(Enum):
    RESERVED = "reserved"
    FILLING = "filling"
    WHOLE = "whole"
    EVICTING = "evicting"
    QUARANTINED = "quarantined"
    FREE = "free"


class FirstBytes(Event):
    """Somebody begins to write."""


class Verified(Event):
    """All of it is there, its digest is right, and who wrote it is fenced off."""


class ReaderEntered(Event):
    """A load or a write to the driver begins to read."""


class ReaderLeft(Event):
    """One that entered reads no more."""


@dataclass(frozen=True, slots=True)
class FreeUnit:
    """Give the unit back to the pool."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block as its unit sees it."""

    generation: int
    state: BlockState = BlockState.RESERVED
    readers: int = 0
    cause: Cause | None = None


TERMINAL = frozenset({BlockState.FREE})

_S = BlockState
TRANSITIONS: Mapping[tuple[BlockState, type[Event]], BlockState] = {
    (_S.RESERVED, FirstBytes): _S.FILLING,
    (_S.RESERVED, Ended): _S.QUARANTINED,
    (_S.FILLING, FirstBytes): _S.FILLING,
    (_S.FILLING, Verified): _S.WHOLE,
    (_S.FILLING, Ended): _S.QUARANTINED,
    (_S.WHOLE, ReaderEntered): _S.WHOLE,
    (_S.WHOLE, ReaderLeft): _S.WHOLE,
    (_S.WHOLE, Ended): _S.EVICTING,
    (_S.EVICTING, ReaderLeft): _S.EVICTING,
    (_S.EVICTING, Ended): _S.EVICTING,
    (_S.QUARANTINED, FirstBytes): _S.QUARANTINED,
    (_S.QUARANTINED, Ended): _S.QUARANTINED,
    (_S.QUARANTINED, Quiesced): _S.FREE,
}

SETTLED: Mapping[tuple[BlockState, bool], BlockState] = {
    (_S.EVICTING, False): _S.FREE,
}
"""Joint rule, applied after each transition: (state, has readers) -> state."""


def step(block: Block, event: Event) -> Step[Block]:
    """The one checked function through which every change of a block goes. Raises IllegalTransition for a row that does
    not exist."""
    entered, outcome = next_state(TRANSITIONS, TERMINAL, block.state, block.generation, event)
    if outcome is not Outcome.APPLIED:
        return Step(block, outcome=outcome)
    readers = block.readers + isinstance(event, ReaderEntered) - isinstance(event, ReaderLeft)
    if readers < 0:
        raise IllegalTransition(f"{type(event).__name__} in {block.state.name} with no readers")
    state = SETTLED.get((entered, readers > 0), entered)
    cause = event.cause if isinstance(event, Ended) and block.cause is None else block.cause
    effects = (FreeUnit(),) if state is BlockState.FREE else ()
    return Step(replace(block, state=state, readers=readers, cause=cause), effects)
