"""Large transfers in parts: each unit in exactly one, and digests as if it had been one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.state.components import IndexKind, StateComponent
from shared.transfer.ledger import Ledger, payload_bytes
from shared.transfer.link import Piece
from shared.transfer.pool import DIGEST_BYTES
from shared.transfer.streams import _LEAST_BYTES, _merged, cut

COMPONENTS = (
    StateComponent("kv", IndexKind.PAGE, 4, (2,), (1 << 15,), "float32", (0, 1, 2)),
    StateComponent("slots", IndexKind.REQUEST, 1, (), (8,), "float32", (0, 1)),
)


def size_of(pieces: list[Piece]) -> int:
    return sum(payload_bytes(COMPONENTS[one.component], len(one.units), one.rows_in_last) for one in pieces)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 6))
def test_parts_hold_every_unit_once_and_merge_to_the_whole(counts: list[int], rows: int, most: int) -> None:
    pieces = [Piece(0, 100 * k, tuple(range(n)), rows) for k, n in enumerate(counts) if n]
    pieces.append(Piece(1, 0, (3,), 1))
    parts = cut(tuple(pieces), COMPONENTS, most)
    assert 1 <= len(parts) <= most
    assert len(parts) == 1 or size_of(pieces) >= len(parts) * _LEAST_BYTES
    for number, piece in enumerate(pieces):
        its = [one for part in parts for which, one in part if which == number]
        assert tuple(unit for one in its for unit in one.units) == piece.units
        assert [one.first_unit for one in its] == [
            piece.first_unit + sum(len(o.units) for o in its[:k]) for k in range(len(its))
        ]
        assert [one.rows_in_last for one in its] == [4] * (len(its) - 1) + [piece.rows_in_last]
    random = np.random.default_rng(1)
    digests = [
        [
            random.integers(0, 256, (len(one.units), DIGEST_BYTES), dtype=np.uint8)
            for _ in COMPONENTS[one.component].layers
        ]
        for part in parts
        for _, one in part
    ]
    by_part, at = [], 0
    for part in parts:
        by_part.append(digests[at : at + len(part)])
        at += len(part)
    one_by_one, whole = Ledger(COMPONENTS), Ledger(COMPONENTS)
    for (_, one), layers in zip([entry for part in parts for entry in part], digests, strict=True):
        one_by_one.record(one.component, one.first_unit, one.rows_in_last, layers)
    for one, layers in zip(pieces, _merged(len(pieces), parts, by_part), strict=True):
        whole.record(one.component, one.first_unit, one.rows_in_last, layers)
    assert one_by_one.receipt() == whole.receipt()
    assert sum(one.num_bytes for one in whole.receipt()) == size_of(pieces)


def test_nothing_to_send_is_one_part() -> None:
    assert cut((), COMPONENTS, 3) == [[]]
