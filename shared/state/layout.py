"""Where every byte of a worker's pool lies: layer-major, component after component, described by offsets only."""

from dataclasses import dataclass

import numpy as np

from shared.state.components import IndexKind, StateComponent

_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model's state a pool holds: that of one of `tp_size` ranks. whole: the components uncut, in the
    pool's order and units."""

    whole: tuple[StateComponent, ...]
    tp_size: int
    rank: int


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """components in order; num_pages units for each PAGE component, num_slots for each REQUEST or RING one. shard: None
    where the pool holds all of the state.

    All PAGE components of a model share page ids (same id, own buffer), and all REQUEST and RING ones share slot ids.
    """

    components: tuple[StateComponent, ...]
    num_pages: int
    num_slots: int
    shard: Shard | None = None

    @property
    def rank(self) -> int:
        return 0 if self.shard is None else self.shard.rank

    @property
    def tp_size(self) -> int:
        return 1 if self.shard is None else self.shard.tp_size

    @property
    def page_tokens(self) -> int:
        """Tokens per page, the same for every PAGE component (1 where a model has none)."""
        sizes = {c.unit_tokens for c in self.components if c.index is IndexKind.PAGE}
        if len(sizes) > 1:
            raise ValueError(f"PAGE components must agree on the page size, got {sorted(sizes)}")
        return sizes.pop() if sizes else 1

    @property
    def model_layers(self) -> int:
        """Layers of the model up to the last one that has state."""
        return 1 + max(max(component.layers) for component in self.components)

    def units_of(self, component: StateComponent) -> int:
        return self.num_pages if component.index is IndexKind.PAGE else self.num_slots

    def offset_of(self, index: int) -> int:
        """Byte offset of component `index`; its array is [layers, units, *unit_shape]."""
        offset = 0
        for component in self.components[:index]:
            size = component.unit_bytes * component.num_layers * self.units_of(component)
            offset += -(-size // _ALIGN) * _ALIGN
        return offset

    @property
    def total_bytes(self) -> int:
        return self.offset_of(len(self.components))

    def view(self, buffer: memoryview, index: int) -> np.ndarray:
        """Component `index` of a mapped pool, [layers, units, *unit_shape]; shares memory with `buffer`."""
        component = self.components[index]
        shape = (component.num_layers, self.units_of(component), *component.unit_shape)
        count = int(np.prod(shape))
        flat = np.frombuffer(buffer, dtype=component.dtype, count=count, offset=self.offset_of(index))
        return flat.reshape(shape)
