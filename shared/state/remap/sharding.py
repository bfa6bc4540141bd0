"""Which heads of which component a rank holds, and whether two groups of ranks hold the same state.

Heads are the places along a component's shard axis. A component without one counts as a single head that every rank
holds, so that nothing after this file has to tell the two apart.
"""

import math
from dataclasses import dataclass, replace

from shared.runtime.errors import GeometryMismatch
from shared.state.components import StateComponent


def num_heads(component: StateComponent) -> int:
    """Places along the shard axis of an uncut component; 1 where every rank holds all of it."""
    return 1 if component.shard_axis is None else component.outer[component.shard_axis]


def heads_held(heads: int, tp_size: int, rank: int) -> range:
    """The heads that `rank` of `tp_size` ranks holds. With at least as many heads as ranks they are dealt out in order
    and as evenly as they go; with fewer, each rank holds one, and neighbours hold the same."""
    first = rank * heads // tp_size
    return range(first, max(first + 1, (rank + 1) * heads // tp_size))


def segments_around(component: StateComponent) -> tuple[int, int]:
    """How often the row axis occurs before and after the shard axis: the products of the other outer dimensions."""
    axis = component.shard_axis
    if axis is None:
        return math.prod(component.outer), 1
    return math.prod(component.outer[:axis]), math.prod(component.outer[axis + 1 :])


@dataclass(frozen=True, slots=True)
class ShardedState:
    """The state of a model as one group of workers keeps it: `components` uncut, with the group's own unit_tokens, and
    how many ranks share them. Raises GeometryMismatch where that cannot be."""

    components: tuple[StateComponent, ...]
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.tp_size < 1:
            raise GeometryMismatch(f"a group of {self.tp_size} ranks holds nothing")
        names = [component.name for component in self.components]
        for component in self.components:
            if names.count(component.name) > 1:
                raise GeometryMismatch(f"component {component.name}: there are two of that name")
            axis = component.shard_axis
            if axis is not None and not 0 <= axis < len(component.outer):
                raise GeometryMismatch(f"component {component.name}: outer {component.outer} has no axis {axis}")
            if math.prod(component.outer) < 1 or math.prod(component.inner) < 1:
                raise GeometryMismatch(f"component {component.name}: its rows have no bytes")

    def of_rank(self, rank: int) -> tuple[StateComponent, ...]:
        """The components as they lie in the pool of `rank`."""
        if not 0 <= rank < self.tp_size:
            raise GeometryMismatch(f"there is no rank {rank} among {self.tp_size}")
        return tuple(_cut(component, self.tp_size, rank) for component in self.components)

    def index_of(self, name: str) -> int:
        """The position of the component of that name."""
        for index, component in enumerate(self.components):
            if component.name == name:
                return index
        raise GeometryMismatch(f"component {name}: there is none of that name")


def check_fit(source: ShardedState, target: ShardedState) -> None:
    """Raises GeometryMismatch, naming the first component that differs in more than its units, its layers' order or
    its number of ranks."""
    missing = {c.name for c in source.components} ^ {c.name for c in target.components}
    if missing:
        name = min(missing)
        side = "source" if any(c.name == name for c in target.components) else "target"
        raise GeometryMismatch(f"component {name}: the {side} does not have it")
    for ours in source.components:
        theirs = target.components[target.index_of(ours.name)]
        for field in ("index", "dtype", "outer", "inner", "shard_axis"):
            a, b = getattr(ours, field), getattr(theirs, field)
            if a != b:
                raise GeometryMismatch(f"component {ours.name}: {field} is {a} at the source, {b} at the target")
        if len(set(ours.layers)) < len(ours.layers) or len(set(theirs.layers)) < len(theirs.layers):
            raise GeometryMismatch(f"component {ours.name}: a layer is named twice")
        if set(ours.layers) != set(theirs.layers):
            odd = sorted(set(ours.layers) ^ set(theirs.layers))
            raise GeometryMismatch(f"component {ours.name}: only one side has it in layers {odd}")


def _cut(component: StateComponent, tp_size: int, rank: int) -> StateComponent:
    axis = component.shard_axis
    if axis is None:
        return component
    held = len(heads_held(component.outer[axis], tp_size, rank))
    return replace(component, outer=(*component.outer[:axis], held, *component.outer[axis + 1 :]))
