"""Which units of a pool are not quiet, as far as the fake link knows: what the simulation checks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.transfer.link import Piece, TicketKey


@dataclass(frozen=True, slots=True)
class Touch:
    """A unit of this pool that the link may still write (its ticket is open) or read (a transfer is under way)."""

    key: TicketKey
    component: int
    unit: int
    writes: bool


def touches(
    open_units: Mapping[TicketKey, tuple[tuple[int, ...], ...]], reads: Iterable[tuple[TicketKey, tuple[Piece, ...]]]
) -> list[Touch]:
    """Of tickets that are open, and of transfers that are under way."""
    written = [
        Touch(key, component, unit, True)
        for key, tables in open_units.items()
        for component, table in enumerate(tables)
        for unit in table
    ]
    read = [
        Touch(key, piece.component, unit, False) for key, pieces in reads for piece in pieces for unit in piece.units
    ]
    return written + read
