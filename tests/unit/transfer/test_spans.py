"""Spans name exactly the bytes that are to move: compared with plain numpy."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.state.layout import PoolLayout
from shared.transfer.pool import Pool, Run
from shared.transfer.spans import Step, holds, spans_of
from tests.contract.transfer_links import LAYOUT

OTHER = PoolLayout(LAYOUT.components, LAYOUT.num_pages + 9, LAYOUT.num_slots + 2)


def pool_of(layout: PoolLayout) -> Pool:
    return Pool(layout, memoryview(bytearray(layout.total_bytes)))


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[Run, Run]]:
    found = []
    for index, component in enumerate(LAYOUT.components):
        limits = [layout.units_of(component) for layout in (LAYOUT, OTHER)]
        count = draw(st.integers(0, min(limits)))
        rows = draw(st.integers(1, component.unit_tokens))
        mine, theirs = (draw(st.permutations(range(limit)))[:count] for limit in limits)
        if draw(st.booleans()):  # neighbours, which chance alone seldom gives
            mine, theirs = range(count), range(count)
        if count:
            first = draw(st.integers(0, component.num_layers - 1))
            layers = range(first, draw(st.integers(first + 1, component.num_layers)))
            found.append((Run(index, tuple(mine), rows, layers), Run(index, tuple(theirs), rows, layers)))
    return found


def rows_of(pool: Pool, run: Run, layer: int) -> Iterator[np.ndarray]:
    """The rows with state of each unit, in the pool, by numpy alone."""
    component, array = pool.layout.components[run.component], pool.layout.view(pool.bytes, run.component)
    for k, unit in enumerate(run.units.tolist()):
        rows = run.rows_in_last if k == len(run.units) - 1 else component.unit_tokens
        yield array[layer, unit][(*(slice(None),) * len(component.outer), slice(0, rows))]


@given(pairs(), st.integers(1, 4096))
def test_they_carry_the_rows_with_state(runs: list[tuple[Run, Run]], max_bytes: int) -> None:
    source, target, expected = pool_of(OTHER), pool_of(LAYOUT), pool_of(LAYOUT)
    random = np.random.default_rng(3)
    there = np.frombuffer(source.bytes, dtype=np.uint8)
    there[:] = random.integers(0, 256, len(there), dtype=np.uint8)
    for mine, theirs in runs:
        for layer in mine.layers:
            for target_rows, rows in zip(rows_of(expected, mine, layer), rows_of(source, theirs, layer), strict=True):
                target_rows[...] = rows
    spans = spans_of(LAYOUT, OTHER, runs, max_bytes)
    here = np.frombuffer(target.bytes, dtype=np.uint8)
    for a, b, length in zip(spans.mine, spans.theirs, spans.lengths, strict=True):
        assert 0 < length <= max_bytes
        here[a : a + length] = there[b : b + length]
    assert target.bytes == expected.bytes


@given(pairs(), st.integers(1, 4096))
def test_each_step_is_whole_units_and_all_are_there(runs: list[tuple[Run, Run]], max_bytes: int) -> None:
    spans = spans_of(LAYOUT, OTHER, runs, max_bytes)
    at, found = 0, []
    for step in spans.steps:
        run, component = runs[step.piece][0], LAYOUT.components[runs[step.piece][0].component]
        whole = step.last - step.first - (step.last == len(run.units))
        rows = whole * component.unit_tokens + (run.rows_in_last if step.last == len(run.units) else 0)
        assert spans.lengths[at : step.end].sum() == rows * component.row_bytes
        assert step.last == step.first + 1 or (step.last - step.first) * component.unit_bytes <= max_bytes
        found += [(step.piece, step.layer, k) for k in range(step.first, step.last)]
        at = step.end
    assert at == len(spans.lengths)
    assert found == [
        (piece, layer, k) for piece, (run, _) in enumerate(runs) for layer in run.layers for k in range(len(run.units))
    ]


@given(pairs(), st.integers(1, 4096), st.integers(1, 7), st.booleans())
def test_batches_hold_every_span_once_and_keep_their_limits(
    runs: list[tuple[Run, Run]], max_bytes: int, max_spans: int, by_step: bool
) -> None:
    spans = spans_of(LAYOUT, OTHER, runs, max_bytes)
    at, ends = 0, {step.end for step in spans.steps}
    for batch in spans.batches(max_bytes, max_spans, by_step=by_step):
        assert batch.start == at
        at = batch.stop
        assert 0 < batch.stop - batch.start <= max_spans
        assert spans.lengths[batch].sum() <= max_bytes
        assert not by_step or not ends & set(range(batch.start + 1, batch.stop))
    assert at == len(spans.lengths)


def test_neighbours_on_both_sides_become_one() -> None:
    whole = LAYOUT.components[0].unit_tokens
    layers = LAYOUT.components[0].num_layers
    every = range(layers)
    runs = [(Run(0, (1, 2, 5, 6), whole, every), Run(0, (3, 4, 5, 6), whole, every))]
    spans = spans_of(LAYOUT, OTHER, runs, 1 << 20)
    assert list(spans.steps) == [Step(0, layer, 0, 4, 2 * (layer + 1)) for layer in range(layers)]
    assert set(spans.lengths.tolist()) == {2 * LAYOUT.components[0].unit_bytes}


@pytest.mark.parametrize(
    "run",
    [
        Run(0, (), 1),
        Run(0, (-1,), 1),
        Run(0, (LAYOUT.num_pages,), 1),
        Run(0, (1 << 80,), 1),
        Run(0, (0,), 0),
        Run(0, (0,), LAYOUT.components[0].unit_tokens + 1),
        Run(-1, (0,), 1),
        Run(len(LAYOUT.components), (0,), 1),
    ],
)
def test_what_a_pool_does_not_hold_is_seen(run: Run) -> None:
    assert not holds(LAYOUT, run)
    assert holds(LAYOUT, Run(0, (0, LAYOUT.num_pages - 1), 1))
