"""A transfer as several, one after the other, where it is the peer that fetches the bytes and cannot be held back."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from shared.state.components import StateComponent
from shared.transfer.backend import Digests, Manifest
from shared.transfer.ledger import bytes_of
from shared.transfer.link import Piece


def in_parts(
    manifest: Manifest,
    components: tuple[StateComponent, ...],
    limit: int,
    move: Callable[[Manifest], Digests],
) -> Digests:
    """Moves a manifest of pieces that exist in parts of about `limit` bytes, each when it is its turn, and returns the
    digests as if it had been moved in one. A unit is not cut."""
    whole = sum(bytes_of(piece, components[piece.component]) for piece in manifest.pieces)
    if whole <= limit:
        manifest.turn.wait(max(1, whole))
        return move(manifest)
    found: list[Digests] = [[] for _ in manifest.pieces]
    for part in _parts(manifest.pieces, components, limit):
        runs = tuple(run for _, run in part)
        manifest.turn.wait(sum(bytes_of(run, components[run.component]) for run in runs))
        for (index, _), layers in zip(part, move(replace(manifest, pieces=runs)), strict=True):
            found[index].append(layers)
    return [_joined(runs) for runs in found]


def _parts(
    pieces: tuple[Piece, ...], components: tuple[StateComponent, ...], limit: int
) -> Iterator[list[tuple[int, Piece]]]:
    """Runs of units in their order, each with the index of its piece."""
    part: list[tuple[int, Piece]] = []
    left = limit
    for index, piece in enumerate(pieces):
        component = components[piece.component]
        unit_bytes = bytes_of(replace(piece, units=piece.units[:1], rows_in_last=component.unit_tokens), component)
        at = 0
        while at < len(piece.units):
            if left < unit_bytes and part:
                yield part
                part, left = [], limit
            units = piece.units[at : at + max(1, left // unit_bytes)]
            first, at = piece.first_unit + at, at + len(units)
            rows = piece.rows_in_last if at == len(piece.units) else component.unit_tokens
            part.append((index, replace(piece, first_unit=first, units=units, rows_in_last=rows)))
            left -= len(units) * unit_bytes
    yield part


def _joined(runs: Digests) -> list[np.ndarray]:
    """The digests of consecutive runs of units, each by layer, as those of one run."""
    return runs[0] if len(runs) == 1 else [np.concatenate(layers) for layers in zip(*runs, strict=True)]
