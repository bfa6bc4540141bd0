"""How pieces are cut into steps and blocks: every row exactly once, alike on both sides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer import coded_rows
from shared.transfer.pool import Pool, Run
from shared.transfer.row_spans import spans_of, steps_of

UNITS = 40


@st.composite
def runs(draw: st.DrawFn) -> tuple[Pool, Run, range]:
    tokens, width = draw(st.integers(1, 4)), draw(st.sampled_from((8, 512, 3000)))
    component = StateComponent("kv", IndexKind.PAGE, tokens, (2,), (width,), "float32", tuple(range(6)))
    layout = PoolLayout((component,), UNITS, 1)
    units = tuple(draw(st.permutations(range(UNITS)))[: draw(st.integers(1, UNITS))])
    first = draw(st.integers(0, 5))
    layers = range(first, draw(st.integers(first + 1, 6)))
    pool = Pool(layout, memoryview(bytearray(layout.total_bytes)))
    return pool, Run(0, units, draw(st.integers(1, tokens))), layers


def wanted(pool: Pool, run: Run, layers: range) -> np.ndarray:
    """[layers, units of the pool, rows]: 1 for each row that is to travel."""
    component = pool.layout.components[0]
    counts = np.zeros((component.num_layers, UNITS, component.unit_tokens), dtype=int)
    for unit in run.units:
        rows = run.rows_in_last if unit == run.units[-1] else component.unit_tokens
        counts[layers.start : layers.stop, unit, :rows] = 1
    return counts


@given(runs())
def test_blocks_hold_every_row_once(case: tuple[Pool, Run, range]) -> None:
    pool, run, layers = case
    component = pool.layout.components[0]
    counts = np.zeros_like(wanted(*case))
    for block in coded_rows.blocks(component, run, layers):
        theirs = run.units[block.first_unit : block.first_unit + len(block.run.units)]
        assert block.run.units.tolist() == theirs.tolist()
        size = len(block.layers) * len(block.run.units) * component.unit_bytes
        single = len(block.layers) == len(block.run.units) == 1
        assert single or size <= coded_rows._BLOCK_BYTES
        assert block.num_rows == (block.run.rows_in_last if len(block.run.units) == 1 else component.unit_tokens)
        for layer in block.layers:
            counts[layer, list(block.run.units), : block.num_rows] += 1
    assert (counts == wanted(*case)).all()


@pytest.mark.parametrize("apart", [False, True])
@given(case=runs(), step_bytes=st.sampled_from((1, 1000, 64 << 10, 512 << 10)))
def test_steps_are_the_piece_in_wire_order(case: tuple[Pool, Run, range], step_bytes: int, apart: bool) -> None:
    pool, run, layers = case
    cut = steps_of(pool.layout, run, layers, step_bytes, apart=apart)
    assert joined(cut.spans) == joined(rows_in_order(pool, run, layers))
    at = 0
    for step in cut.steps:
        theirs = run.units[step.first_unit : step.first_unit + len(step.run.units)]
        assert step.run.units.tolist() == theirs.tolist()
        assert len(step.layers) == 1 or not apart
        assert step.num_bytes <= step_bytes or len(step.run.units) == len(step.layers) == 1
        assert step.spans.start == at
        at = step.spans.stop
        own, its = spans_of(pool.layout, step.run, step.layers).reshape(-1, 2), cut.spans[step.spans.start : at]
        assert joined(its) == joined(own)
        assert step.num_bytes == its[:, 1].sum()
    assert at == len(cut.spans)


def rows_in_order(pool: Pool, run: Run, layers: range) -> np.ndarray:
    """(first byte, length) of each row of each segment, in wire order."""
    component = pool.layout.components[0]
    shape = (component.num_layers, UNITS, *component.outer, component.unit_tokens)
    row_bytes = component.unit_bytes // (shape[2] * shape[3])
    begins, found = np.arange(np.prod(shape)).reshape(shape) * row_bytes, []
    for layer in layers:
        for k, unit in enumerate(run.units.tolist()):
            rows = run.rows_in_last if k == len(run.units) - 1 else component.unit_tokens
            found.append(begins[layer, unit, :, :rows].ravel())
    flat = np.concatenate(found)
    return np.stack((flat, np.full_like(flat, row_bytes)), axis=1)


def joined(spans: np.ndarray) -> list[list[int]]:
    """The same bytes in the same order, in as few spans as can be."""
    begins, ends = spans[:, 0], spans[:, 0] + spans[:, 1]
    first = np.flatnonzero(np.append(True, begins[1:] != ends[:-1]))
    return np.stack((begins[first], np.append(ends[first[1:] - 1], ends[-1])), axis=1).tolist()
