"""Host memory for the state of groups that gave their pages up: bounded, and counted to the byte.

Room is taken and given back on the loop; the bytes themselves are copied by the compute thread, in a step.
"""

from dataclasses import dataclass

import torch

from shared.state.components import IndexKind
from shared.state.layout import PoolLayout


@dataclass(frozen=True, slots=True)
class Place:
    """One sequence among the saved units: the prompt (choice None) or a choice. pages: which of the saved pages are
    its own, in logical order; its slot is the one with this place's number. computed: positions with state."""

    choice: int | None
    pages: tuple[int, ...]
    computed: int


@dataclass(slots=True)
class Saved:
    """The state of a group outside the pool. tensors: one a component, [layers, units, *unit_shape], set by the step
    that copies; until that step is over nobody else looks at it."""

    places: tuple[Place, ...]
    num_bytes: int
    tensors: tuple[torch.Tensor, ...] = ()

    @property
    def computed(self) -> int:
        """Of the prompt."""
        return self.places[0].computed


class Stash:
    """The budget: `used_bytes` never exceeds `limit_bytes`, and is 0 when nobody is away."""

    def __init__(self, layout: PoolLayout, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        paged = [c for c in layout.components if c.index is IndexKind.PAGE]
        slotted = [c for c in layout.components if c.index is not IndexKind.PAGE]
        self._page_bytes = sum(c.unit_bytes * c.num_layers for c in paged)
        self._slot_bytes = sum(c.unit_bytes * c.num_layers for c in slotted)

    def try_take(self, num_pages: int, places: tuple[Place, ...]) -> Saved | None:
        """Room for so many pages and a slot for each place; None where there is not so much."""
        num_bytes = num_pages * self._page_bytes + len(places) * self._slot_bytes
        if self.used_bytes + num_bytes > self.limit_bytes:
            return None
        self.used_bytes += num_bytes
        return Saved(places, num_bytes)

    def give_back(self, saved: Saved) -> None:
        """Once for each that was taken. What a step is still copying is dropped when that step is over."""
        self.used_bytes -= saved.num_bytes
