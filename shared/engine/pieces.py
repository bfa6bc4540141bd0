"""What of a prompt's state may leave once a chunk of it, or some layers of a chunk, are computed."""

import functools
from dataclasses import replace

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


def in_layers(layout: PoolLayout, pieces: tuple[Piece, ...], layers: range) -> tuple[Piece, ...]:
    """What of whole pieces lies in these layers of the model."""
    cut = []
    for piece in pieces:
        for start, count in stored_layers(layout.components[piece.component].layers, layers):
            cut.append(replace(piece, first_layer=start, num_layers=count))
    return tuple(cut)


@functools.cache
def stored_layers(stored: tuple[int, ...], layers: range) -> tuple[tuple[int, int], ...]:
    """Where a component that has the model's layers `stored` keeps `layers` of it: (first, count) of runs."""
    runs: list[tuple[int, int]] = []
    for at, layer in enumerate(stored):
        if layer in layers:
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((at, 1))
    return tuple(runs)
