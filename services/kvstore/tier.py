"""The units of one namespace in memory, and the block that is in each: every change of a block goes through here."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.machines.block import Block, BlockState, FreeUnit, ReaderEntered, ReaderLeft, step
from shared.machines.stepping import Cause, Ended, Event, Outcome, Quiesced
from shared.runtime.counters import Counters
from shared.runtime.errors import PoolExhausted
from shared.state.pages import PageAllocator


@dataclass(slots=True, eq=False)
class Held:
    """A use of a unit, by the block under `key`. Readers hold it rather than the block's entry: evicted under them, it
    is still theirs."""

    key: bytes
    unit: int
    block: Block

    @property
    def is_whole(self) -> bool:
        return self.block.state is BlockState.WHOLE

    @property
    def is_used(self) -> bool:
        """Whether somebody writes or reads it, or may."""
        return not self.is_whole or self.block.readers > 0


@dataclass(slots=True)
class Tier:
    """num_units: of the namespace's pool. block_bytes: of one block, in all layers. block_tokens: what it covers."""

    num_units: int
    block_bytes: int
    block_tokens: int
    counters: Counters
    units: PageAllocator = field(init=False)
    states: Counter[str] = field(init=False, default_factory=Counter)
    """How many blocks are in which state."""
    num_idle: int = field(init=False, default=0)
    """Whole ones that nobody reads."""
    _held: dict[Held, None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.units = PageAllocator(self.num_units)

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held))

    def take(self, key: bytes, generation: int) -> Held | None:
        """A unit for the block, RESERVED; None where none is free."""
        try:
            (unit,) = self.units.take(1, generation)
        except PoolExhausted:
            return None
        held = Held(key, unit, Block(generation))
        self._held[held] = None
        self._count(held, 1)
        return held

    def apply(self, held: Held, event: Event) -> None:
        """Steps the block's machine. A late event is counted and changes nothing."""
        moved = step(held.block, event)
        if moved.outcome is not Outcome.APPLIED:
            self.counters.add(f"events_{moved.outcome.value}")
            return
        self._count(held, -1)
        held.block = moved.ticket
        self._count(held, 1)
        if FreeUnit() in moved.effects:
            self._count(held, -1)
            self.units.give_back_all(held.block.generation)
            del self._held[held]

    def enter(self, held: Held) -> None:
        self.apply(held, ReaderEntered(held.block.generation))

    def leave(self, held: Held) -> None:
        self.apply(held, ReaderLeft(held.block.generation))

    def end(self, held: Held, cause: Cause) -> None:
        self.apply(held, Ended(held.block.generation, cause))

    def quiesced(self, held: Held) -> None:
        """Nobody writes the unit of a block that was given up."""
        self.apply(held, Quiesced(held.block.generation))

    def _count(self, held: Held, by: int) -> None:
        self.states[held.block.state.value] += by
        self.num_idle += 0 if held.is_used else by
