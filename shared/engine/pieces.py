"""What of a prompt's state may leave once a chunk of it is computed."""

from shared.state.components import IndexKind
from shared.state.layout import PoolLayout
from shared.transfer.link import Piece


def chunk_pieces(
    layout: PoolLayout, start: int, end: int, last: bool, pages: tuple[int, ...], slot: int
) -> tuple[Piece, ...]:
    """Positions [start, end) were computed now; everything before `start` was, too. Whole pages that became complete
    leave; the last chunk also brings the rest of the pages and the request-indexed state, which changes until then.

    pages, slot: the prompt's own, in logical order. Over all chunks each unit appears exactly once.
    """
    pieces = []
    for index, component in enumerate(layout.components):
        if component.index is IndexKind.PAGE:
            rows = component.unit_tokens
            first = start // rows
            after = component.num_units(end) if last else end // rows
            rows_in_last = component.rows_in_last_unit(end) if last else rows
            if after > first:
                pieces.append(Piece(index, first, pages[first:after], rows_in_last))
        elif last:
            pieces.append(Piece(index, 0, (slot,), component.rows_in_last_unit(end)))
    return tuple(pieces)
