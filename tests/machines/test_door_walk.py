"""The real door under any order of openings, transfers, fences and ends, beside a model that knows who may write what:
no layer of a unit has two writers, a fence is answered once and only when nobody is inside, and nothing is remembered
for ever.
"""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from shared.runtime.errors import InvalidRequest, UnknownRoom
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer import door as module
from shared.transfer.door import Door
from shared.transfer.grant import Grant, Refused
from shared.transfer.link import TicketKey
from shared.transfer.wire import Header, WirePiece, sign

NUM_UNITS = 8
LAYOUT = PoolLayout((StateComponent("kv", IndexKind.PAGE, 2, (), (1,), "uint8", (0, 1, 2)),), NUM_UNITS, 0)
LAYERS = st.sampled_from([range(3), range(1), range(1, 3), range(2, 3)])
Cell = tuple[int, int]
"""Layer and logical unit."""
NONCE = b"nonce"
ROOMS = st.integers(1, 3)
GENERATIONS = st.integers(1, 3)


class DoorWalk(RuleBasedStateMachine):
    grants = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.announced: list[TicketKey] = []
        self.door = Door(LAYOUT, lambda key, _backend: self.announced.append(key))
        self.tables: dict[TicketKey, tuple[int, ...]] = {}
        self.fenced: dict[TicketKey, int] = {}
        self.inside: list[Grant] = []
        self.landed: dict[TicketKey, set[Cell]] = {}
        self.openings: dict[TicketKey, int] = {}
        self.answered = 0
        self.expected_answers = 0

    def is_open(self, key: TicketKey) -> bool:
        return key in self.tables and key not in self.fenced

    @rule(room=ROOMS, generation=GENERATIONS, order=st.permutations(range(NUM_UNITS)), count=st.integers(1, 5))
    def a_ticket_is_opened(self, room: int, generation: int, order: list[int], count: int) -> None:
        """With units of no other ticket, as the worker's books see to."""
        key = TicketKey(room, generation)
        taken = {unit for other in self.tables.values() for unit in other}
        units = tuple([unit for unit in order if unit not in taken][:count])
        if key in self.tables:
            with pytest.raises(InvalidRequest):
                self.door.open(key, b"secret", (units,))
            return
        if not units:
            return
        self.door.open(key, b"secret", (units,))
        self.tables[key], self.landed[key] = units, set()
        self.openings[key] = self.openings.get(key, 0) + 1

    @precondition(lambda self: self.tables)
    @rule(target=grants, data=st.data())
    def a_writer_knocks(self, data: st.DataObject) -> object:
        """With the secret of an open ticket, for some of its units: which another writer may be busy with."""
        key = data.draw(st.sampled_from(sorted(self.tables, key=lambda key: (key.room, key.generation))))
        size = len(self.tables[key])
        first = data.draw(st.integers(0, size - 1))
        return self.knock(key, first, data.draw(st.integers(1, size - first)), b"secret", data.draw(LAYERS))

    @rule(
        target=grants,
        room=ROOMS,
        generation=GENERATIONS,
        first=st.integers(-1, 4),
        count=st.integers(0, 4),
        secret=st.sampled_from([b"secret", b"other"]),
        layers=LAYERS | st.sampled_from([range(3, 4), range(2, 4), range(-1, 2), range(0)]),
    )
    def a_stranger_knocks(
        self, room: int, generation: int, first: int, count: int, secret: bytes, layers: range
    ) -> object:
        return self.knock(TicketKey(room, generation), first, count, secret, layers)

    def knock(self, key: TicketKey, first: int, count: int, secret: bytes, layers: range = range(3)) -> object:
        room, generation = key.room, key.generation
        piece = WirePiece(
            component=0,
            first_layer=layers.start,
            num_layers=len(layers),
            first_unit=first,
            num_units=count,
            rows_in_last=2,
        )
        header = Header(room=room, generation=generation, sequence=0, pieces=(piece,))
        raw = header.model_dump_json().encode()
        table = self.tables.get(key, ())
        wanted = {(layer, unit) for layer in layers for unit in range(first, first + count)}
        busy = {cell for grant in self.inside if grant.key == key for cell in cells(grant)}
        exists = bool(wanted) and first >= 0 and first + count <= len(table) and 0 <= layers.start < layers.stop <= 3
        may_enter = self.is_open(key) and secret == b"secret" and exists and not busy & wanted
        try:
            grant = self.door.admit(header, raw, sign(secret, NONCE, 0, raw), NONCE, "test", lambda: None)
        except Refused:
            assert not may_enter
            return multiple()
        assert may_enter
        mine = grant.runs[0]
        assert (tuple(mine.units), mine.layers) == (table[first : first + count], layers)
        self.inside.append(grant)
        self.landed[key] -= wanted
        return grant

    @rule(grant=consumes(grants), whole=st.booleans())
    def a_writer_leaves(self, grant: Grant, whole: bool) -> None:
        self.leave(grant, whole)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def a_fence_overtakes_a_writer(self, data: st.DataObject) -> None:
        """It has written everything, but says so too late."""
        key = data.draw(st.sampled_from(sorted(self.tables, key=lambda key: (key.room, key.generation))))
        grant = self.knock(key, 0, 1, b"secret")
        if isinstance(grant, Grant):
            self.fence(key)
            self.leave(grant, whole=True)

    def leave(self, grant: Grant, whole: bool) -> None:
        self.inside.remove(grant)
        if whole:
            piece = grant.pieces[0]
            digests = [[np.zeros((piece.num_units, 16), np.uint8) for _ in piece.layers]]
            assert self.door.landed(grant, digests) == (grant.key not in self.fenced)
            if grant.key not in self.fenced:
                self.landed[grant.key] |= cells(grant)
        self.door.leave(grant)
        self.settle(grant.key)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def whom_somebody_writes_to_is_fenced(self, data: st.DataObject) -> None:
        self.fence(data.draw(st.sampled_from([grant.key for grant in self.inside])))

    @rule(room=ROOMS, generation=GENERATIONS)
    def anybody_is_fenced(self, room: int, generation: int) -> None:
        self.fence(TicketKey(room, generation))

    def fence(self, key: TicketKey) -> None:
        if key in self.tables:
            self.fenced[key] = self.fenced.get(key, 0) + 1
        else:
            self.expected_answers += 1
        self.door.fence(key, self.answer)
        self.settle(key)

    def answer(self) -> None:
        self.answered += 1

    def settle(self, key: TicketKey) -> None:
        """What a fence waits for has come true: the ticket is gone, and all who asked are told."""
        if key in self.fenced and not any(grant.key == key for grant in self.inside):
            self.expected_answers += self.fenced.pop(key)
            del self.tables[key], self.landed[key]

    @invariant()
    def every_fence_is_answered_once_and_in_time(self) -> None:
        assert self.answered == self.expected_answers

    @invariant()
    def who_was_fenced_is_told_to_stop(self) -> None:
        for grant in self.inside:
            assert grant.stopped.is_set() == (grant.key in self.fenced)

    @invariant()
    def no_layer_of_a_unit_has_two_writers(self) -> None:
        written = [
            (layer, unit) for grant in self.inside for run in grant.runs for layer in run.layers for unit in run.units
        ]
        assert len(written) == len(set(written))

    @invariant()
    def receipts_speak_of_what_landed(self) -> None:
        for key, landed in self.landed.items():
            assert self.door.received(key)[0].num_bytes == 2 * len(landed)
        with pytest.raises(UnknownRoom):
            self.door.received(TicketKey(99, 1))

    @invariant()
    def the_first_bytes_of_an_opening_are_announced_once(self) -> None:
        for key, openings in self.openings.items():
            assert self.announced.count(key) <= openings

    @invariant()
    def nothing_is_remembered_for_ever(self) -> None:
        assert len(self.door._ended) <= module._NUM_TOMBSTONES
        assert sum(self.door.snapshot()[0].values()) == len(self.tables)


def cells(grant: Grant) -> set[Cell]:
    piece = grant.pieces[0]
    units = range(piece.first_unit, piece.first_unit + piece.num_units)
    return {(layer, unit) for layer in piece.layers for unit in units}


TestDoorWalk = DoorWalk.TestCase


@pytest.mark.parametrize("table", [(-1,), (NUM_UNITS,), (0, 0), (1, 2, 1)])
def test_a_ticket_with_odd_units_is_not_opened(table: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest):
        Door(LAYOUT, lambda key, _backend: None).open(TicketKey(1, 1), b"secret", (table,))
