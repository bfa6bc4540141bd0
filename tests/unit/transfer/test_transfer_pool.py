"""Byte arithmetic of runs against plain numpy, for layouts and runs of every shape."""

from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared.runtime.errors import TransferRefused
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.kernels import Kernels, load_kernels
from shared.transfer.ledger import Ledger, payload_bytes
from shared.transfer.pool import Pool, Run, create_pool, room_for_digests

shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> PoolLayout:
    components = []
    page_tokens = draw(st.sampled_from([1, 2, 16]))
    for k in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(list(IndexKind)))
        rows = {IndexKind.PAGE: page_tokens, IndexKind.REQUEST: 1, IndexKind.RING: 5}[kind]
        layers = tuple(range(draw(st.integers(1, 3))))
        dtype = draw(st.sampled_from(["uint8", "float16", "float32"]))
        components.append(StateComponent(f"c{k}", kind, rows, draw(shapes), draw(shapes), dtype, layers))
    return PoolLayout(tuple(components), draw(st.integers(6, 9)), 6)


def random_pool(layout: PoolLayout, seed: int) -> Pool:
    data = np.random.default_rng(seed).integers(0, 256, layout.total_bytes, dtype=np.uint8)
    return Pool(layout, memoryview(bytearray(data.tobytes())))


def rows_of(pool: Pool, run: Run, layer: int) -> list[bytes]:
    """The rows with state of each unit, by numpy alone."""
    component = pool.layout.components[run.component]
    array = pool.layout.view(pool.bytes, run.component)
    found = []
    for k, unit in enumerate(run.units):
        rows = run.rows_in_last if k == len(run.units) - 1 else component.unit_tokens
        cut = (slice(None),) * len(component.outer) + (slice(0, rows),)
        found.append(np.ascontiguousarray(array[layer, unit][cut]).tobytes())
    return found


def payload(layout: PoolLayout, run: Run) -> int:
    return payload_bytes(layout.components[run.component], len(run.units), run.rows_in_last)


@st.composite
def copies(draw: st.DrawFn) -> tuple[PoolLayout, PoolLayout, Run, Run]:
    layout = draw(layouts())
    other = PoolLayout(layout.components, draw(st.integers(6, 12)), draw(st.integers(6, 8)))
    index = draw(st.integers(0, len(layout.components) - 1))
    rows = draw(st.integers(1, layout.components[index].unit_tokens))
    count = draw(st.integers(1, 6))
    theirs = draw(st.permutations(range(6)))[:count]
    mine = draw(st.permutations(range(6)))[:count]
    return layout, other, Run(index, tuple(theirs), rows), Run(index, tuple(mine), rows)


def copy_layer(target: Pool, source: Pool, theirs: Run, mine: Run, layer: int) -> np.ndarray:
    """Returns the digests of what was written."""
    layers = range(layer, layer + 1)
    found = room_for_digests(mine, layers)
    for _ in target.copying(source, theirs, mine, layers, found):
        pass
    return found[0]


@pytest.mark.parametrize("kernels", [None, load_kernels()], ids=["plain", "compiled"])
@given(case=copies())
def test_a_copy_moves_the_rows_with_state_and_nothing_else(
    case: tuple[PoolLayout, PoolLayout, Run, Run], kernels: Kernels | None
) -> None:
    layout, other, theirs, mine = case
    source, target = with_kernels(kernels, random_pool(layout, 1), random_pool(other, 2))
    before = bytes(target.bytes)
    for layer in range(target.num_layers(mine.component)):
        wanted = rows_of(source, theirs, layer)
        digests = copy_layer(target, source, theirs, mine, layer)
        assert rows_of(target, mine, layer) == wanted
        assert [one.tobytes() for one in digests] == [xxhash.xxh3_128_digest(rows) for rows in wanted]
        assert digests.tobytes() == target.digests(mine, layer).tobytes() == source.digests(theirs, layer).tobytes()
    changed = sum(a != b for a, b in zip(before, bytes(target.bytes), strict=True))
    assert changed <= payload(layout, mine)
    # Put the rows back: then nothing differs.
    clean = random_pool(other, 2)
    for layer in range(target.num_layers(mine.component)):
        copy_layer(target, clean, mine, mine, layer)
    assert bytes(target.bytes) == before


@pytest.mark.parametrize("kernels", [None, load_kernels()], ids=["plain", "compiled"])
@given(case=copies(), burst=st.sampled_from([1, 100, 700, 1 << 20]), data=st.data())
def test_bursts_come_to_the_same_as_layers_and_can_be_left_off(
    case: tuple[PoolLayout, PoolLayout, Run, Run], burst: int, data: st.DataObject, kernels: Kernels | None
) -> None:
    layout, other, theirs, mine = case
    source, target = with_kernels(kernels, random_pool(layout, 1), random_pool(other, 2))
    wanted, plain = random_pool(other, 2), random_pool(layout, 1)
    num_layers = target.num_layers(mine.component)
    first = data.draw(st.integers(0, num_layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, num_layers)))
    digests = [copy_layer(wanted, plain, theirs, mine, layer) for layer in layers]
    found, again = room_for_digests(mine, layers), room_for_digests(mine, layers)
    steps = list(target.copying(source, theirs, mine, layers, found, burst))
    moved = payload(layout, mine) // num_layers * len(layers)
    assert sum(steps) == sum(target.digesting(mine, layers, again, burst)) == moved
    assert max(steps) < burst + len(layers) * layout.components[mine.component].unit_bytes
    assert bytes(target.bytes) == bytes(wanted.bytes)
    assert (found == digests).all()
    assert (again == digests).all()
    undigested = random_pool(other, 2)
    undigested.kernels = kernels
    assert sum(undigested.copying(source, theirs, mine, layers, None, burst)) == moved
    assert bytes(undigested.bytes) == bytes(wanted.bytes)


@pytest.mark.parametrize("kernels", [None, load_kernels()], ids=["plain", "compiled"])
def test_what_is_left_off_moves_no_further(kernels: Kernels | None) -> None:
    layout = PoolLayout((StateComponent("c", IndexKind.PAGE, 2, (), (512,), "uint8", (0, 1)),), 30, 0)
    source, target = with_kernels(kernels, random_pool(layout, 1), random_pool(layout, 2))
    run, before = Run(0, tuple(range(30)), 2), bytes(target.bytes)
    found = room_for_digests(run, range(2))
    steps = target.copying(source, run, run, range(2), found, 4096)
    assert next(steps) == 4096
    assert bytes(target.bytes) == bytes(source.bytes[:4096]) + before[4096:]
    assert next(steps) == 4096
    assert bytes(target.bytes) == bytes(source.bytes[:8192]) + before[8192:]


def with_kernels(kernels: Kernels | None, *pools: Pool) -> tuple[Pool, ...]:
    for pool in pools:
        pool.kernels = kernels
    return pools


@pytest.fixture(autouse=True, scope="module")
def _kernels_for_few_units_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shared.transfer.pool._FEW", 0)
        yield


@given(copies(), st.data())
def test_a_ledger_does_not_see_how_units_were_cut(
    case: tuple[PoolLayout, PoolLayout, Run, Run], data: st.DataObject
) -> None:
    layout, _, run, _ = case
    pool = random_pool(layout, 3)
    layers = range(pool.num_layers(run.component))
    whole, cut = Ledger(layout.components), Ledger(layout.components)
    whole.record(run.component, 0, run.rows_in_last, [pool.digests(run, layer) for layer in layers])
    at = data.draw(st.integers(0, len(run.units) - 1))
    full, middle = layout.components[run.component].unit_tokens, data.draw(st.integers(0, len(layers)))
    parts = [(0, Run(run.component, run.units[:at], full)), (at, Run(run.component, run.units[at:], run.rows_in_last))]
    for some in (layers[middle:], layers[:middle]):
        for first, part in reversed(parts):
            if len(part.units) and some:
                digests = [pool.digests(part, layer) for layer in some]
                cut.record(run.component, first, part.rows_in_last, digests, some.start)
    assert whole.receipt() == cut.receipt()
    assert whole.receipt()[run.component].num_bytes == payload(layout, run)
    flat = b"".join(xxhash.xxh3_128_digest(rows) for layer in layers for rows in rows_of(pool, run, layer))
    assert whole.receipt()[run.component].digest == xxhash.xxh3_128_hexdigest(flat)


class Spoiling(np.ndarray):
    """Memory that does not keep what is written to it."""

    def __setitem__(self, where: slice, value: np.ndarray) -> None:
        super().__setitem__(where, value)
        super().__setitem__(where.start, self[where.start] ^ 0xFF)


@pytest.mark.parametrize("rows", [2, 1])
def test_the_receiver_digests_what_it_holds_and_not_what_it_was_sent(rows: int) -> None:
    layout = PoolLayout((StateComponent("c", IndexKind.PAGE, 2, (), (3,), "uint8", (0,)),), 6, 0)
    source, target = random_pool(layout, 1), random_pool(layout, 2)
    target._flat = target._flat.view(Spoiling)
    run = Run(0, (3,), rows)
    digests = copy_layer(target, source, run, run, 0)
    assert (digests != source.digests(run, 0)).any()
    assert [one.tobytes() for one in digests] == [xxhash.xxh3_128_digest(rows) for rows in rows_of(target, run, 0)]


def test_what_is_dropped_is_not_in_the_receipt() -> None:
    layout = PoolLayout((StateComponent("c", IndexKind.PAGE, 2, (), (3,), "uint8", (0,)),), 6, 0)
    pool, ledger = random_pool(layout, 4), Ledger(layout.components)
    ledger.record(0, 0, 2, [pool.digests(Run(0, (0, 1, 2), 2), 0)])
    ledger.drop(0, 1, 2, range(1))
    alone = Ledger(layout.components)
    alone.record(0, 0, 2, [pool.digests(Run(0, (0,), 2), 0)])
    assert ledger.receipt() == alone.receipt()


def test_a_pool_must_be_as_large_as_its_layout() -> None:
    layout = PoolLayout((StateComponent("c", IndexKind.PAGE, 16, (), (512,), "float32", (0,)),), 6, 0)
    fd = create_pool(layout)
    Pool.map(fd, layout, writable=True)
    with pytest.raises(TransferRefused, match="geometry"):
        Pool.map(fd, PoolLayout(layout.components, 7, 0), writable=False)
    with pytest.raises(TransferRefused, match="geometry"):
        Pool.map(fd, PoolLayout(layout.components, -1, 0), writable=False)
