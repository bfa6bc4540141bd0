"""One step as values: what the scheduler decided, and what computing it brought. Nothing here changes once it is
made, so the compute thread and the loop never look at the same mutable thing.
"""

from dataclasses import dataclass

from shared.engine.sampler import Sampled, SampleRow
from shared.engine.stash import Saved
from shared.runtime.errors import EngineError
from shared.transfer.link import TicketKey


@dataclass(frozen=True, slots=True)
class CopyPage:
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CopySlot:
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A link has put state into these units."""

    pages: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Copies these units into host memory, in this order."""

    key: TicketKey
    saved: Saved
    pages: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Copies saved units back: (number among the saved ones, unit of the pool). leaves: as a row's."""

    key: TicketKey
    saved: Saved
    pages: tuple[tuple[int, int], ...]
    slots: tuple[tuple[int, int], ...]
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: `tokens` at positions start, start + 1 …

    choice: None while it is the group's trunk that is computed, before the choices part. samples: tokens to draw
    from the last position's logits; several where the choices of a prompt draw their first ones. leaves: a link will
    read the state that it writes; leaves_by: so many layers at a time, ahead of the step's end (0: none ahead).
    """

    key: TicketKey
    choice: int | None
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    slot: int
    samples: tuple[SampleRow, ...]
    leaves: bool = False
    leaves_by: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """First the copies in order, then what is saved, then what is loaded, then one forward over all rows."""

    copies: tuple[CopyPage | CopySlot | Arrival, ...]
    rows: tuple[Row, ...]
    saves: tuple[Save, ...] = ()
    loads: tuple[Load, ...] = ()

    @property
    def keys(self) -> tuple[TicketKey, ...]:
        """The groups whose units it uses, each once."""
        return tuple({part.key: None for parts in (self.rows, self.saves, self.loads) for part in parts})

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """For each row of the plan its samples in order, or why that row alone could not be sampled."""

    sampled: tuple[tuple[Sampled, ...] | EngineError, ...]
