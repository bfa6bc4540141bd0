"""One step as values: what the scheduler decided, and what computing it brought. Nothing here changes once it is
made, so the compute thread and the loop never look at the same mutable thing.
"""

from dataclasses import dataclass

from shared.engine.sampler import Sampled, SampleRow
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
class Row:
    """One sequence's share of a step: `tokens` at positions start, start + 1 …

    choice: None while it is the group's prompt that is computed, before the choices part. samples: tokens to draw
    from the last position's logits; several where the choices of a prompt draw their first ones.
    """

    key: TicketKey
    choice: int | None
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    slot: int
    samples: tuple[SampleRow, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """First the copies in order, then one forward over all rows."""

    copies: tuple[CopyPage | CopySlot, ...]
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """For each row of the plan its samples in order, or why that row alone could not be sampled."""

    sampled: tuple[tuple[Sampled, ...] | EngineError, ...]
