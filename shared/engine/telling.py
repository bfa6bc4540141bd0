"""What somebody who takes a prompt's chunks is told, and when: each unit and layer of its state once."""

from shared.engine.api import ChunkDone
from shared.engine.effects import StepEffects
from shared.engine.pieces import chunk_pieces, in_layers
from shared.engine.sequence import Group
from shared.state.layout import PoolLayout
from shared.transfer.link import Piece


class Telling:
    """Keeps its books in the groups: `told`, `told_layers`, `ahead`."""

    def __init__(self, layout: PoolLayout) -> None:
        self._layout = layout

    def chunk(self, group: Group, effects: StepEffects) -> bool:
        """All that is computed, unless it is to leave at the end only, or the consumer has it. Returns whether that was
        the last chunk."""
        complete = group.computed == group.prompt_len
        if not complete and (not group.cut.by_chunks or group.computed <= group.told):
            return False
        pieces = self._untold(group, group.computed, self._layout.model_layers)
        first = group.first if complete else ()
        effects.chunks.append((group.key, ChunkDone(group.told, group.computed, pieces, first)))
        group.ahead += 1
        group.told, group.told_layers = group.computed, 0
        return complete

    def layers(self, group: Group, end: int, num_layers: int, effects: StepEffects) -> None:
        """Of a chunk up to `end` so many of the model's layers are computed."""
        if pieces := self._untold(group, end, num_layers):
            effects.chunks.append((group.key, ChunkDone(group.told, end, pieces, partial=True)))
            group.told_layers = num_layers

    def _untold(self, group: Group, end: int, num_layers: int) -> tuple[Piece, ...]:
        assert group.trunk_slot is not None
        pages, slot = tuple(group.trunk_pages), group.trunk_slot
        pieces = chunk_pieces(self._layout, group.told, end, end == group.prompt_len, pages, slot)
        return in_layers(self._layout, pieces, range(group.told_layers, num_layers)) if group.cut.layers else pieces
