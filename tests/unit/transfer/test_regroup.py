"""Who cuts state differently, at the door and in the piece between: what is let in, what is counted where, and that a
transfer that was stopped puts nothing into pages."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from shared.runtime.errors import TransferError
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout, Shard
from shared.state.remap import Fit, fit_between
from shared.transfer.backend import Digests, Faults
from shared.transfer.door import Door
from shared.transfer.grant import Grant, Refused
from shared.transfer.link import TicketKey
from shared.transfer.pool import Pool, Run
from shared.transfer.regroup import GatheringMover, RegroupingMover, Staging, source_of
from shared.transfer.wire import Header, WirePiece, sign

KEY, SECRET, NONCE = TicketKey(5, 1), b"secret", b"nonce"
KV = StateComponent("kv", IndexKind.PAGE, 4, (2,), (3,), "uint8", (0, 1), 0)
LATENT = StateComponent("latent", IndexKind.PAGE, 4, (), (2,), "uint8", (0,))
OURS = PoolLayout((KV, LATENT), 6, 0)
TABLE = ((5, 2, 0), (5, 2, 0))
BOTH = WirePiece(component=0, num_layers=2, first_unit=0, num_units=2, rows_in_last=4)


def in_pages(page_tokens: int) -> PoolLayout:
    return PoolLayout(tuple(replace(c, unit_tokens=page_tokens) for c in OURS.components), 12, 0)


def rank(number: int, page_tokens: int = 4) -> PoolLayout:
    """Of two ranks: one head each, and the latent of both."""
    whole = in_pages(page_tokens).components
    return PoolLayout((replace(whole[0], outer=(1,)), whole[1]), 12, 0, Shard(whole, 2, number))


def fit(source: PoolLayout) -> Fit:
    found = fit_between(source, OURS)
    assert found is not None
    return found


@pytest.fixture
def door() -> Door:
    door = Door(OURS, lambda key, backend: None)
    door.open(KEY, SECRET, TABLE)
    return door


def knock(door: Door, source: PoolLayout, *pieces: WirePiece) -> Grant:
    header = Header(room=KEY.room, generation=KEY.generation, sequence=0, pieces=pieces)
    raw = header.model_dump_json().encode()
    return door.admit(header, raw, sign(SECRET, NONCE, 0, raw), NONCE, "test", lambda: None, fit(source))


def digests_of(piece: WirePiece, value: int) -> Digests:
    return [[np.full((piece.num_units, 16), value, np.uint8) for _ in piece.layers]]


@pytest.mark.parametrize(
    ("page_tokens", "first_unit", "num_units", "rows", "units"),
    [
        (4, 1, 2, 3, (2, 0)),
        (2, 0, 1, 2, (5,)),
        (2, 1, 2, 1, (5, 2)),
        (2, 5, 1, 2, (0,)),
        (8, 0, 1, 4, (5,)),
        (8, 0, 1, 5, (5, 2)),
        (8, 1, 1, 4, (0,)),
        (3, 1, 2, 3, (5, 2, 0)),
    ],
)
def test_a_grant_names_our_units_that_the_senders_rows_lie_in(
    door: Door, page_tokens: int, first_unit: int, num_units: int, rows: int, units: tuple[int, ...]
) -> None:
    change = {"first_unit": first_unit, "num_units": num_units, "rows_in_last": rows}
    source = rank(0) if page_tokens == 4 else in_pages(page_tokens)
    assert knock(door, source, BOTH.model_copy(update=change)).runs[0].units.tolist() == list(units)


@pytest.mark.parametrize(
    ("page_tokens", "change", "reason"),
    [
        (2, {"first_unit": 5, "num_units": 2, "rows_in_last": 2}, "bad_range"),
        (8, {"first_unit": 1, "num_units": 1, "rows_in_last": 5}, "bad_range"),
        (8, {"first_unit": 2, "num_units": 1}, "bad_range"),
        (8, {"rows_in_last": 9}, "bad_rows"),
        (2, {"rows_in_last": 3}, "bad_rows"),
        (2, {"num_layers": 3}, "bad_layers"),
        (2, {"component": 2}, "bad_component"),
        (2, {"num_units": 10**30, "rows_in_last": 1}, "bad_range"),
    ],
)
def test_what_does_not_fit_is_refused(door: Door, page_tokens: int, change: dict[str, int], reason: str) -> None:
    with pytest.raises(Refused) as caught:
        knock(door, in_pages(page_tokens), BOTH.model_copy(update=change))
    assert caught.value.reason == reason


def test_ranks_fill_the_same_units_at_once_and_are_counted_apart(door: Door) -> None:
    grants = [knock(door, rank(number), BOTH) for number in range(2)]
    with pytest.raises(Refused, match="overlap"):
        knock(door, rank(1), BOTH)
    for number, grant in enumerate(grants):
        assert door.landed(grant, digests_of(BOTH, number))
        door.leave(grant)
    first, second = door.received(KEY, 0), door.received(KEY, 1)
    assert first[0].num_bytes == second[0].num_bytes == 8 * 3 * 2
    assert first[0].digest != second[0].digest
    assert door.received(KEY) == first
    assert door.received(KEY, 7)[0].num_bytes == 0


def test_what_comes_from_another_rank_is_not_let_in(door: Door) -> None:
    latent = BOTH.model_copy(update={"component": 1, "num_layers": 1})
    came = [number for number in range(2) if fit(rank(number)).travels(1)]
    assert len(came) == 1, "every rank has it, so one of them brings it"
    knock(door, rank(came[0]), latent)
    with pytest.raises(Refused, match="bad_component"):
        knock(door, rank(1 - came[0]), latent)


def test_a_ticket_is_filled_by_one_cut_of_each_rank(door: Door) -> None:
    """Its books could not be compared with anybody's."""
    door.leave(knock(door, in_pages(2), BOTH.model_copy(update={"rows_in_last": 2})))
    with pytest.raises(Refused, match="somebody else"):
        knock(door, in_pages(8), BOTH.model_copy(update={"first_unit": 0, "num_units": 1}))


def test_pages_that_are_held_stay_as_they_are() -> None:
    door = Door(OURS, lambda key, backend: None)
    door.open(KEY, SECRET, TABLE, held_len=4)
    for change in ({"num_units": 3}, {"first_unit": 1, "num_units": 2}):
        with pytest.raises(Refused, match="bad_range"):
            knock(door, in_pages(2), BOTH.model_copy(update={"rows_in_last": 2} | change))
    later = BOTH.model_copy(update={"first_unit": 2, "rows_in_last": 2})
    assert knock(door, in_pages(2), later).runs[0].units.tolist() == [2]


def test_of_a_page_that_is_held_in_part_only_the_rest_is_written() -> None:
    """Our first page is held, and the sender's first page has it and the second."""
    door, target = Door(OURS, lambda key, backend: None), pool(OURS, 1)
    door.open(KEY, SECRET, TABLE, held_len=4)
    for rows in (1, 4):
        with pytest.raises(Refused, match="bad_range"):
            knock(door, in_pages(8), BOTH.model_copy(update={"num_units": 1, "rows_in_last": rows}))
    before = OURS.view(target.bytes, 0).copy()
    grant = knock(door, in_pages(8), BOTH.model_copy(update={"num_units": 1, "rows_in_last": 7}))
    assert grant.runs[0].units.tolist() == [2]
    assert grant.fit is not None
    RegroupingMover(grant.fit, target, Landing(stopped=False)).land(grant)
    after = OURS.view(target.bytes, 0)
    assert (after[:, 2, :, :3] == 0x77).all()
    before[:, 2, :, :3] = 0x77
    assert (after == before).all()


def pool(layout: PoolLayout, seed: int) -> Pool:
    data = np.random.default_rng(seed).integers(0, 256, layout.total_bytes, dtype=np.uint8)
    return Pool(layout, memoryview(bytearray(data.tobytes())))


class Landing:
    """Fills whatever pool it is given, and is stopped at the end of it."""

    fit = None

    def __init__(self, *, stopped: bool) -> None:
        self._stopped = stopped

    def check(self, header: Header) -> None: ...

    def stop(self) -> None: ...

    def land(self, grant: Grant) -> Digests:
        raise AssertionError("it would land in our pages")

    def land_in(self, pool: Pool, grant: Grant) -> Digests:
        np.frombuffer(pool.bytes, dtype=np.uint8)[:] = 0x77
        if self._stopped:
            grant.stopped.set()
        return []


@pytest.mark.parametrize("stopped", [False, True])
def test_what_was_stopped_after_it_came_is_not_put_into_pages(door: Door, stopped: bool) -> None:
    target = pool(OURS, 1)
    before = bytes(target.bytes)
    grant = knock(door, in_pages(8), BOTH.model_copy(update={"num_units": 1, "rows_in_last": 7}))
    assert grant.fit is not None
    RegroupingMover(grant.fit, target, Landing(stopped=stopped)).land(grant)
    changed = sum(a != b for a, b in zip(before, bytes(target.bytes), strict=True))
    assert (changed == 0) == stopped
    assert changed <= 7 * 2 * 3 * 2


def test_a_stop_is_noticed_between_two_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.transfer.regroup._BURST_BYTES", 16)
    target, asked = pool(OURS, 1), threading.Event()
    piece = BOTH.model_copy(update={"num_units": 1, "rows_in_last": 8})
    staging = Staging(fit(in_pages(8)), (piece,), target)
    before, answers = bytes(target.bytes), iter([False, False, True])
    np.frombuffer(staging.pool.bytes, dtype=np.uint8)[:] = 0x77

    def is_stopped() -> bool:
        asked.set()
        return next(answers)

    staging.scatter(0, target, Run(0, (5, 2), 4, range(2)), range(2), is_stopped)
    changed = sum(a != b for a, b in zip(before, bytes(target.bytes), strict=True))
    assert asked.is_set()
    assert 0 < changed < 8 * 2 * 3 * 2
    assert next(answers, None) is None


def test_a_sender_reads_its_own_pages_unless_only_some_heads_go() -> None:
    for source, staged in ((in_pages(8), False), (rank(0), False), (OURS, True)):
        target = rank(1) if source is OURS else OURS
        found = fit_between(source, target)
        assert found is not None
        own, runs = pool(source, 3), [Run(0, (1, 2), 4, range(2))]
        read, places = source_of(found, own, runs, (BOTH,), lambda: False)
        assert (read is not own) == (places is not runs) == staged


def test_a_sender_that_gathers_heads_stops_between_two_layers() -> None:
    found = fit_between(OURS, rank(1))
    assert found is not None
    answers = iter([False, True])
    with pytest.raises(TransferError, match="aborted"):
        source_of(found, pool(OURS, 3), [Run(0, (1, 2), 4, range(2))], (BOTH,), lambda: next(answers))
    assert next(answers, None) is None


def test_where_heads_are_cut_nobody_waits_for_bursts() -> None:
    """All is gathered before the first one: permits would stay in the connection."""
    found = fit_between(OURS, rank(1))
    assert found is not None
    mover = GatheringMover(found, pool(rank(1), 1), Landing(stopped=False), pool(OURS, 2), Faults())
    header = Header(room=KEY.room, generation=KEY.generation, sequence=0, pieces=(BOTH,))
    mover.check(header)
    with pytest.raises(Refused, match="bad_bursts"):
        mover.check(header.model_copy(update={"burst_bytes": 100, "num_bursts": 2}))


def test_layers_of_the_same_units_share_their_place_and_others_do_not() -> None:
    source, target = pool(in_pages(8), 5), pool(OURS, 6)
    parts = [
        {"first_layer": 0, "num_layers": 1},
        {"first_layer": 1, "num_layers": 1},
        {"first_unit": 1, "num_layers": 2},
    ]
    pieces = [BOTH.model_copy(update={"num_units": 1, "rows_in_last": 4} | part) for part in parts]
    staging = Staging(fit(in_pages(8)), pieces, target)
    assert [run.units.tolist() for run in staging.runs] == [[0], [0], [1]]
    for number, units in enumerate(((3,), (3,), (9,))):
        staging.gather(number, source, units, pieces[number].layers)
    for run, units in zip(staging.runs, ((3,), (3,), (9,)), strict=True):
        for layer in run.layers:
            theirs = source.digests(Run(0, units, 4), layer)
            assert (staging.pool.digests(run, layer) == theirs).all()
