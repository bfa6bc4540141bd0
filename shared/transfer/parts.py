"""A transfer as several: pieces cut into parts that are transfers of their own, and the digests of all parts as those
of the whole. To the receiver they are transfers of one ticket, none of which touches another's units."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from shared.state.components import StateComponent
from shared.transfer.backend import Digests
from shared.transfer.ledger import bytes_of
from shared.transfer.link import Piece

Part = list[tuple[int, Piece]]
"""Pieces, each with the number of the one that it is a part of. Those of one piece are in order."""


def size_of(part: Part, components: Sequence[StateComponent]) -> int:
    """Bytes of its rows with state."""
    return sum(bytes_of(piece, components[piece.component]) for _, piece in part)


def alike(pieces: Sequence[Piece], components: Sequence[StateComponent], most: int, least_bytes: int) -> list[Part]:
    """Parts of about equal size: `most` of them, fewer where one would have less than `least_bytes`, at least one."""
    count = max(1, min(most, size_of(list(enumerate(pieces)), components) // least_bytes))
    parts: list[Part] = [[] for _ in range(count)]
    for number, piece in enumerate(pieces):
        borders = [len(piece.units) * k // count for k in range(count + 1)]
        for part, (first, end) in zip(parts, pairwise(borders), strict=True):
            if first < end:
                part.append((number, _some(piece, first, end, components)))
    return [part for part in parts if part] or [[]]


def in_order(pieces: Sequence[Piece], components: Sequence[StateComponent], limit: int) -> Iterator[Part]:
    """Parts of at most `limit` bytes, but at least one unit, to be moved one after the other. Nothing is one part."""
    part: Part = []
    left = limit
    for number, piece in enumerate(pieces):
        unit_bytes = max(1, size_of([(number, _some(piece, 0, 1, components))], components))
        at = 0
        while at < len(piece.units):
            if left < unit_bytes and part:
                yield part
                part, left = [], limit
            end = min(at + max(1, left // unit_bytes), len(piece.units))
            part.append((number, _some(piece, at, end, components)))
            left -= (end - at) * unit_bytes
            at = end
    yield part


def merged(num_pieces: int, parts: Sequence[Part], digests: Sequence[Digests]) -> Digests:
    """The digests of the whole pieces. parts: in the order of the units of each piece."""
    found: list[Digests] = [[] for _ in range(num_pieces)]
    for part, its in zip(parts, digests, strict=True):
        for (number, _), layers in zip(part, its, strict=True):
            found[number].append(layers)
    return [
        cuts[0] if len(cuts) == 1 else [np.concatenate(layer) for layer in zip(*cuts, strict=True)] for cuts in found
    ]


def _some(piece: Piece, first: int, end: int, components: Sequence[StateComponent]) -> Piece:
    """Units [first, end) of it; all rows of those before the last of all."""
    rows = piece.rows_in_last if end == len(piece.units) else components[piece.component].unit_tokens
    return replace(piece, first_unit=piece.first_unit + first, units=piece.units[first:end], rows_in_last=rows)
