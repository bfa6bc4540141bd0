"""Runs of a chain, and how much of one a store has after a put."""

import pytest

from shared.store.client import _leading
from shared.store.runs import BlockRun

CHAIN = tuple(bytes([k]) * 16 for k in range(6))


def test_a_run_knows_where_in_its_chain_it_is() -> None:
    assert BlockRun.of(CHAIN) == BlockRun(CHAIN, CHAIN[0])
    run = BlockRun.of(CHAIN, 2, 5)
    assert run == BlockRun(CHAIN[2:5], CHAIN[0], CHAIN[1], 2)
    assert run.part(0, 2) == BlockRun.of(CHAIN, 2, 4)
    assert run.part(1, 9) == BlockRun.of(CHAIN, 3, 5)
    assert BlockRun.of(()).keys == ()


@pytest.mark.parametrize(
    ("held", "wanted", "leading"),
    [(0, (), 0), (3, (), 3), (0, (0, 1), 2), (2, (2, 3), 4), (1, (2, 3), 1), (2, (2, 4), 3), (0, (1,), 0)],
)
def test_leading_blocks_after_a_put(held: int, wanted: tuple[int, ...], leading: int) -> None:
    assert _leading(held, wanted) == leading
