"""Cut into parts, a transfer is still the same bytes, the same units, and the same digests."""

from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from shared.state.components import IndexKind, StateComponent
from shared.transfer.backend import Digests
from shared.transfer.ledger import Ledger, payload_bytes
from shared.transfer.link import Piece
from shared.transfer.parts import Part, alike, in_order, merged, size_of

COMPONENTS = (
    StateComponent("kv", IndexKind.PAGE, 4, (2, 3), (5,), "float32", (0, 1, 2)),
    StateComponent("index", IndexKind.PAGE, 4, (), (7,), "uint8", (0, 2)),
)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Piece, ...]:
    found, first = [], {0: 0, 1: 0}
    for component in draw(st.lists(st.integers(0, 1), min_size=1, max_size=3)):
        count, layers = draw(st.integers(1, 9)), COMPONENTS[component].num_layers
        first[component] += draw(st.integers(0, 9))
        units = tuple(draw(st.lists(st.integers(0, 23), min_size=count, max_size=count)))
        layer = draw(st.sampled_from((0, layers - 1)))
        rows = draw(st.integers(1, COMPONENTS[component].unit_tokens))
        found.append(Piece(component, first[component], units, rows, layer, draw(st.sampled_from((None, 1)))))
        first[component] += count
    return tuple(found)


def stamps(piece: Piece) -> list[np.ndarray]:
    """Digests that say which unit they are of, and by how many rows."""
    component = COMPONENTS[piece.component]
    rows = [component.unit_tokens] * len(piece.units)
    rows[-1] = piece.rows_in_last
    logical = range(piece.first_unit, piece.first_unit + len(piece.units))
    return [
        np.array([[layer, unit, at, n] * 4 for unit, at, n in zip(piece.units, logical, rows, strict=True)], np.uint8)
        for layer in piece.layers(component.num_layers)
    ]


def receipt_of(moved: Sequence[tuple[Piece, list[np.ndarray]]]) -> object:
    ledger = Ledger(COMPONENTS)
    for piece, layers in moved:
        ledger.record(piece.component, piece.first_unit, piece.rows_in_last, layers, piece.first_layer)
    return ledger.receipt()


def check(whole: tuple[Piece, ...], parts: list[Part]) -> None:
    """Each unit is in one part, and the digests of all parts are those of the whole."""
    for number, piece in enumerate(whole):
        cuts = [one for part in parts for which, one in part if which == number]
        assert tuple(unit for one in cuts for unit in one.units) == piece.units
        ends = [piece.first_unit + sum(len(one.units) for one in cuts[:k]) for k in range(len(cuts))]
        assert [one.first_unit for one in cuts] == ends
        full = COMPONENTS[piece.component].unit_tokens
        assert [one.rows_in_last for one in cuts] == [full] * (len(cuts) - 1) + [piece.rows_in_last]
    assert sum(size_of(part, COMPONENTS) for part in parts) == sum(
        payload_bytes(COMPONENTS[p.component], len(p.units), p.rows_in_last, len(stamps(p))) for p in whole
    )
    digests: list[Digests] = [[stamps(piece) for _, piece in part] for part in parts]
    joined = merged(len(whole), parts, digests)
    for found, piece in zip(joined, whole, strict=True):
        assert np.array_equal(found, stamps(piece))
    by_part = [entry for part, its in zip(parts, digests, strict=True) for entry in zip(part, its, strict=True)]
    assert receipt_of([(piece, layers) for (_, piece), layers in by_part]) == receipt_of(
        list(zip(whole, joined, strict=True))
    )


@given(pieces(), st.integers(1, 20_000))
def test_parts_in_order_are_the_whole(whole: tuple[Piece, ...], limit: int) -> None:
    parts = list(in_order(whole, COMPONENTS, limit))
    check(whole, parts)
    for part in parts:
        assert size_of(part, COMPONENTS) <= limit or (len(part), len(part[0][1].units)) == (1, 1)
    order = [(number, piece.first_unit) for part in parts for number, piece in part]
    assert order == sorted(order)


@given(pieces(), st.integers(1, 6), st.integers(1, 5000))
@example(whole=(Piece(0, 0, tuple(range(12)), 4), Piece(1, 0, (3,), 1)), most=3, least_bytes=1000)
def test_parts_that_are_alike_are_the_whole(whole: tuple[Piece, ...], most: int, least_bytes: int) -> None:
    parts = alike(whole, COMPONENTS, most, least_bytes)
    check(whole, parts)
    assert 1 <= len(parts) <= most
    sizes = [size_of(part, COMPONENTS) for part in parts]
    assert len(parts) == 1 or sum(sizes) >= len(parts) * least_bytes
    unit_bytes = sum(size_of([(0, Piece(p.component, 0, (0,), 4))], COMPONENTS) for p in whole)
    assert max(sizes) - min(sizes) <= 2 * unit_bytes or len(parts) < min(most, sum(sizes) // least_bytes)


def test_nothing_is_one_part() -> None:
    assert list(in_order((), COMPONENTS, 10)) == alike((), COMPONENTS, 3, 10) == [[]]
    assert merged(0, [[]], [[]]) == []
