"""Digests made little by little are those of the rows, whatever the steps, with kernels and without."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.kernels import load_kernels
from shared.transfer.pool import Pool, Run, room_for_digests

ROWS, LAYERS, UNITS = 8, 5, 40
WIDE = StateComponent("wide", IndexKind.PAGE, ROWS, (2, 3), (16,), "float32", tuple(range(LAYERS)))
NARROW = StateComponent("narrow", IndexKind.PAGE, ROWS, (), (2,), "uint8", tuple(range(LAYERS)))
LAYOUT = PoolLayout((WIDE, NARROW), num_pages=UNITS, num_slots=1)
KERNELS = load_kernels()


@pytest.fixture(scope="module")
def data() -> memoryview:
    return memoryview(np.random.default_rng(1).integers(0, 256, LAYOUT.total_bytes, dtype=np.uint8).tobytes())


def expected(data: memoryview, run: Run) -> np.ndarray:
    """By the layout's own view of the pool."""
    view = LAYOUT.view(data, run.component)  # [layers, units, *outer, rows, *inner]
    axis = len(LAYOUT.components[run.component].outer)
    found = room_for_digests(run, run.layers)
    for number, layer in enumerate(run.layers):
        for k, unit in enumerate(run.units):
            rows = ROWS if k < len(run.units) - 1 else run.rows_in_last
            state = np.ascontiguousarray(np.take(view[layer, unit], range(rows), axis))
            found[number, k] = np.frombuffer(xxhash.xxh3_128_digest(state), dtype=np.uint8)
    return found


@pytest.mark.parametrize("compiled", [False, True])
@given(draw=st.data())
def test_digests_do_not_depend_on_the_steps_they_are_made_in(
    data: memoryview, compiled: bool, draw: st.DataObject
) -> None:
    pool = Pool(LAYOUT, data)
    pool.kernels = KERNELS if compiled else None
    units = draw.draw(st.lists(st.integers(0, UNITS - 1), min_size=1, max_size=12, unique=True))
    first = draw.draw(st.integers(0, LAYERS - 1))
    layers = range(first, draw.draw(st.integers(first + 1, LAYERS)))
    run = Run(draw.draw(st.integers(0, 1)), units, draw.draw(st.integers(1, ROWS)), layers)
    found = room_for_digests(run, layers)
    digester = pool.digester(run, layers, found)
    for number in sorted(draw.draw(st.lists(st.integers(0, digester.total), max_size=6))):
        digester.upto(number)
        assert digester.done >= number
    digester.rest()
    assert (found == expected(data, run)).all()


def test_whole_units_are_numbered_layer_after_layer(data: memoryview) -> None:
    run = Run(0, (3, 1, 7), ROWS - 1, range(1, 4))
    digester = Pool(LAYOUT, data).digester(run, run.layers, room_for_digests(run, run.layers))
    assert digester.total == 3 * 2
    assert [digester.whole_below(layer, unit) for layer, unit in ((1, 0), (1, 2), (1, 3), (2, 1), (3, 3))] == [
        0,
        2,
        2,
        3,
        6,
    ]
