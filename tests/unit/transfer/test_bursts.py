"""Cut into bursts, a transfer is still the same bytes, the same units, and the same digests."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.transfer.backend import Digests, Manifest
from shared.transfer.bursts import in_parts
from shared.transfer.ledger import Ledger, payload_bytes
from shared.transfer.link import Piece, TicketKey
from tests.contract.transfer_links import LAYOUT


@dataclass
class Turns:
    asked: list[int] = field(default_factory=list)
    burst_bytes: int = 1
    window_bytes: int = 0

    def wait(self, num_bytes: int) -> None:
        self.asked.append(num_bytes)

    def at_once(self, num_bytes: int) -> bool:
        return False

    def abort(self) -> None: ...


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Piece, ...]:
    found = []
    for component in draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)):
        count = draw(st.integers(1, 9))
        first = draw(st.integers(0, 9))
        rows = draw(st.integers(1, LAYOUT.components[component].unit_tokens))
        units = tuple(draw(st.lists(st.integers(0, 23), min_size=count, max_size=count)))
        found.append(Piece(component, first, units, rows))
    return tuple(found)


def stamps(piece: Piece) -> list[np.ndarray]:
    """Digests that say which unit they are of, and by how many rows."""
    component = LAYOUT.components[piece.component]
    rows = [component.unit_tokens] * len(piece.units)
    rows[-1] = piece.rows_in_last
    logical = range(piece.first_unit, piece.first_unit + len(piece.units))
    return [
        np.array([[layer, unit, where, n] * 4 for unit, where, n in zip(piece.units, logical, rows, strict=True)])
        for layer in range(component.num_layers)
    ]


@given(pieces(), st.integers(1, 20_000))
def test_parts_are_the_whole_in_turns(whole: tuple[Piece, ...], limit: int) -> None:
    turn = Turns()
    moved: list[tuple[Piece, ...]] = []

    def move(part: Manifest) -> Digests:
        assert len(turn.asked) == len(moved) + 1, "each part has its turn"
        moved.append(part.pieces)
        return [stamps(piece) for piece in part.pieces]

    digests = in_parts(Manifest(TicketKey(1, 1), b"s", whole, turn=turn), LAYOUT.components, limit, move)
    for found, piece in zip(digests, whole, strict=True):
        for ours, expected in zip(found, stamps(piece), strict=True):
            assert np.array_equal(ours, expected)
    sizes = [
        [payload_bytes(LAYOUT.components[p.component], len(p.units), p.rows_in_last) for p in part] for part in moved
    ]
    assert turn.asked == [sum(part) for part in sizes]
    for part, part_sizes in zip(moved, sizes, strict=True):
        assert sum(part_sizes) <= limit or (len(part), len(part[0].units)) == (1, 1)
    ledgers = [Ledger(LAYOUT.components) for _ in range(2)]
    for piece, layers in zip(whole, digests, strict=True):
        ledgers[0].record(piece.component, piece.first_unit, piece.rows_in_last, [d.astype(np.uint8) for d in layers])
    for part in moved:
        for piece in part:
            stamped = [digest.astype(np.uint8) for digest in stamps(piece)]
            ledgers[1].record(piece.component, piece.first_unit, piece.rows_in_last, stamped)
    assert ledgers[0].receipt() == ledgers[1].receipt()


def test_a_transfer_of_nothing_has_one_turn() -> None:
    turn = Turns()
    assert in_parts(Manifest(TicketKey(1, 1), b"s", (), turn=turn), LAYOUT.components, 10, lambda part: []) == []
    assert turn.asked == [1]
