"""The door alone: who is let in, and what a fence waits for."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from shared.runtime.errors import InvalidRequest, UnknownRoom
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.door import Door
from shared.transfer.grant import Grant, Refused
from shared.transfer.link import TicketKey
from shared.transfer.wire import Header, WirePiece, sign

LAYOUT = PoolLayout((StateComponent("kv", IndexKind.PAGE, 4, (), (2,), "uint8", (0, 1)),), 8, 0)
KEY, SECRET, NONCE = TicketKey(77, 1), b"secret", b"nonce"
PIECE = WirePiece(component=0, num_layers=2, first_unit=0, num_units=2, rows_in_last=4)
DIGESTS = [[np.repeat(np.frombuffer(pair, np.uint8), 16).reshape(2, 16) for pair in (b"ab", b"cd")]]


class Bell:
    def __init__(self) -> None:
        self.rung = 0

    def __call__(self) -> None:
        self.rung += 1


@pytest.fixture
def announced() -> list[TicketKey]:
    return []


@pytest.fixture
def door(announced: list[TicketKey]) -> Door:
    door = Door(LAYOUT, lambda key, _backend: announced.append(key))
    door.open(KEY, SECRET, ((5, 2, 7),))
    return door


def knock(door: Door, *pieces: WirePiece, key: TicketKey = KEY, stop: Bell | None = None) -> Grant:
    header = Header(room=key.room, generation=key.generation, sequence=3, pieces=pieces)
    raw = header.model_dump_json().encode()
    return door.admit(header, raw, sign(SECRET, NONCE, 3, raw), NONCE, "test", stop or Bell())


def test_a_grant_names_the_receivers_own_units(door: Door, announced: list[TicketKey]) -> None:
    grant = knock(door, replace_piece(first_unit=1))
    assert grant.runs[0].units.tolist() == [2, 7]
    assert announced == [KEY]


def replace_piece(**changes: int) -> WirePiece:
    return PIECE.model_copy(update=changes)


@pytest.mark.parametrize(
    ("reason", "piece"),
    [
        ("bad_component", replace_piece(component=1)),
        ("bad_component", replace_piece(component=-1)),
        ("bad_layers", replace_piece(num_layers=0)),
        ("bad_layers", replace_piece(num_layers=3)),
        ("bad_layers", replace_piece(first_layer=1)),
        ("bad_layers", replace_piece(first_layer=-1)),
        ("bad_layers", replace_piece(num_layers=10**30)),
        ("bad_range", replace_piece(first_unit=2)),
        ("bad_range", replace_piece(first_unit=-1)),
        ("bad_range", replace_piece(num_units=0)),
        ("bad_range", replace_piece(num_units=10**30)),
        ("bad_rows", replace_piece(rows_in_last=0)),
        ("bad_rows", replace_piece(rows_in_last=5)),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(
    door: Door, announced: list[TicketKey], reason: str, piece: WirePiece
) -> None:
    with pytest.raises(Refused) as caught:
        knock(door, piece)
    assert caught.value.reason == reason
    assert announced == []


def test_the_signature_covers_the_nonce_the_sequence_and_the_header(door: Door) -> None:
    header = Header(room=KEY.room, generation=1, sequence=3, pieces=(PIECE,))
    raw = header.model_dump_json().encode()
    for mac in (
        sign(SECRET, b"other", 3, raw),
        sign(SECRET, NONCE, 4, raw),
        sign(SECRET, NONCE, 3, raw + b" "),
        sign(b"other", NONCE, 3, raw),
        b"",
    ):
        with pytest.raises(Refused, match="bad_mac"):
            door.admit(header, raw, mac, NONCE, "test", Bell())
    door.admit(header, raw, sign(SECRET, NONCE, 3, raw), NONCE, "test", Bell())


def test_a_fence_stops_the_writer_and_waits_for_it(door: Door) -> None:
    stop, quiesced = Bell(), Bell()
    grant = knock(door, PIECE, stop=stop)
    door.fence(KEY, quiesced)
    door.fence(KEY, quiesced)
    assert (stop.rung, quiesced.rung) == (2, 0)
    assert grant.stopped.is_set()
    assert not door.landed(grant, DIGESTS)
    with pytest.raises(Refused, match="dead_room"):
        knock(door, replace_piece(first_unit=2, num_units=1))
    door.leave(grant)
    assert quiesced.rung == 2
    with pytest.raises(UnknownRoom):
        door.received(KEY)
    with pytest.raises(Refused, match="dead_room"):
        knock(door, PIECE)
    door.fence(KEY, quiesced)
    assert quiesced.rung == 3


def test_a_transfer_that_pauses_is_woken_by_the_fence(door: Door) -> None:
    grant, woken = knock(door, PIECE), []
    assert not grant.stopped.wait(0)
    pausing = threading.Thread(target=lambda: woken.append(grant.stopped.wait(60)))
    pausing.start()
    door.fence(KEY, Bell())
    pausing.join(60)
    assert woken == [True]
    assert grant.stopped.wait(0)


def test_the_room_is_remembered_only_while_that_is_bounded(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.transfer.door._NUM_TOMBSTONES", 2)
    for room in (1, 2, 3):
        door.open(TicketKey(room, 1), SECRET, ((0,),))
        door.fence(TicketKey(room, 1), Bell())
    reasons = {}
    for room in (1, 2, 3):
        with pytest.raises(Refused) as caught:
            knock(door, PIECE, key=TicketKey(room, 1))
        reasons[room] = caught.value.reason
    assert reasons == {1: "unknown_room", 2: "dead_room", 3: "dead_room"}


def test_an_older_attempt_is_told_so(door: Door) -> None:
    door.open(replace(KEY, generation=2), SECRET, ((1,),))
    door.fence(KEY, Bell())
    with pytest.raises(Refused, match="stale_generation"):
        knock(door, PIECE)


def test_what_is_written_again_is_not_counted_until_it_landed(door: Door) -> None:
    grant = knock(door, PIECE)
    assert door.landed(grant, DIGESTS)
    door.leave(grant)
    assert door.received(KEY)[0].num_bytes == 2 * 2 * 8
    again = knock(door, replace_piece(num_units=1))
    door.leave(again)
    assert door.received(KEY)[0].num_bytes == 2 * 8


def layer_of(number: int, **changes: int) -> WirePiece:
    return replace_piece(first_layer=number, num_layers=1, **changes)


def test_layers_of_a_unit_may_be_written_at_once_and_each_by_one(door: Door) -> None:
    lower = knock(door, layer_of(0))
    with pytest.raises(Refused, match="overlap"):
        knock(door, PIECE)
    with pytest.raises(Refused, match="overlap"):
        knock(door, layer_of(0, first_unit=1))
    upper = knock(door, layer_of(1))
    assert (lower.runs[0].layers, upper.runs[0].layers) == (range(1), range(1, 2))
    with pytest.raises(Refused, match="overlap"):
        knock(door, layer_of(1, first_unit=1, num_units=1))
    knock(door, layer_of(1, first_unit=2, num_units=1))


@pytest.mark.parametrize(
    ("pieces", "overlap"),
    [
        ((layer_of(0), layer_of(1)), False),
        ((layer_of(0), layer_of(0, first_unit=2, num_units=1)), False),
        ((layer_of(0), layer_of(0, first_unit=1)), True),
        ((layer_of(1), replace_piece(num_units=1)), True),
        ((layer_of(0, num_units=3), layer_of(1, num_units=1), layer_of(1, first_unit=1)), False),
        ((layer_of(0, num_units=3), layer_of(1, num_units=1), replace_piece(first_unit=1)), True),
    ],
)
def test_pieces_of_a_transfer_overlap_only_in_a_layer_of_a_unit(
    door: Door, pieces: tuple[WirePiece, ...], overlap: bool
) -> None:
    for order in (pieces, pieces[::-1]):
        if overlap:
            with pytest.raises(Refused, match="overlap"):
                knock(door, *order)
        else:
            door.leave(knock(door, *order))


def test_a_layer_that_never_came_is_missing_in_the_receipt(door: Door) -> None:
    whole, other = Door(LAYOUT, lambda key, _backend: None), [[DIGESTS[0][1]]]
    whole.open(KEY, SECRET, ((5, 2, 7),))
    assert whole.landed(knock(whole, PIECE), DIGESTS)
    assert door.landed(knock(door, layer_of(1)), other)
    assert door.received(KEY)[0].num_bytes == 2 * 8
    assert door.landed(knock(door, layer_of(0)), [[DIGESTS[0][0]]])
    assert door.received(KEY) == whole.received(KEY)


def test_the_pages_that_are_held_stay_as_they_are() -> None:
    door = Door(LAYOUT, lambda key, _backend: None)
    door.open(KEY, SECRET, ((5, 2, 7),), held_len=4)
    for piece in (PIECE, replace_piece(num_units=1), replace_piece(num_units=3)):
        with pytest.raises(Refused, match="bad_range"):
            knock(door, piece)
    assert knock(door, replace_piece(first_unit=1)).runs[0].units.tolist() == [2, 7]


def test_a_failing_announcement_lets_nobody_in() -> None:
    def fail(key: TicketKey, backend: str) -> None:
        raise RuntimeError("the loop is gone")

    door, quiesced = Door(LAYOUT, fail), Bell()
    door.open(KEY, SECRET, ((5, 2, 7),))
    with pytest.raises(RuntimeError):
        knock(door, PIECE)
    door.fence(KEY, quiesced)
    assert quiesced.rung == 1


def test_an_open_ticket_is_not_opened_again(door: Door) -> None:
    with pytest.raises(InvalidRequest):
        door.open(KEY, SECRET, ((1,),))
    with pytest.raises(InvalidRequest):
        door.open(TicketKey(78, 1), b"", ((1,),))


@pytest.mark.parametrize("accepted", [None, ("raw",), ("raw", "lossless", "fp8")])
def test_only_formats_that_the_ticket_accepts_come_in(
    announced: list[TicketKey], accepted: tuple[str, ...] | None
) -> None:
    door = Door(LAYOUT, lambda key, _backend: announced.append(key))
    given = {} if accepted is None else {"formats": accepted}
    door.open(KEY, SECRET, ((5, 2, 7),), **given)
    for name in ("raw", "lossless", "fp16", "fp8", "nonsense"):
        header = Header(room=KEY.room, generation=1, sequence=3, pieces=(PIECE,), wire_format=name)
        raw = header.model_dump_json().encode()
        if name in (accepted or ("raw", "lossless")):
            grant = door.admit(header, raw, sign(SECRET, NONCE, 3, raw), NONCE, "test", Bell())
            assert grant.wire_format == name
            door.leave(grant)
            continue
        with pytest.raises(Refused) as caught:
            door.admit(header, raw, sign(SECRET, NONCE, 3, raw), NONCE, "test", Bell())
        assert caught.value.reason == "bad_format"
