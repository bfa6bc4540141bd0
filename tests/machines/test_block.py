"""The life of a block in the kvstore's memory, transition by transition, and under events in any order."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.machines.block import (
    TRANSITIONS,
    Block,
    BlockState,
    FirstBytes,
    FreeUnit,
    ReaderEntered,
    ReaderLeft,
    Verified,
    step,
)
from shared.machines.stepping import Cause, Ended, Event, IllegalTransition, Outcome, Quiesced

G = 3
END = Ended(G, Cause("evicted"))
EVENTS: tuple[Event, ...] = (FirstBytes(G), Verified(G), ReaderEntered(G), ReaderLeft(G), END, Quiesced(G))


def after(*events: Event) -> Block:
    block = Block(G)
    for event in events:
        block = step(block, event).ticket
    return block


WALKS: dict[str, tuple[tuple[Event, ...], BlockState]] = {
    "taken": ((), BlockState.RESERVED),
    "bytes come": ((FirstBytes(G),), BlockState.FILLING),
    "and go on": ((FirstBytes(G), FirstBytes(G)), BlockState.FILLING),
    "all there": ((FirstBytes(G), Verified(G)), BlockState.WHOLE),
    "read": ((FirstBytes(G), Verified(G), ReaderEntered(G), ReaderLeft(G)), BlockState.WHOLE),
    "evicted": ((FirstBytes(G), Verified(G), END), BlockState.FREE),
    "evicted under a reader": ((FirstBytes(G), Verified(G), ReaderEntered(G), END), BlockState.EVICTING),
    "and again": ((FirstBytes(G), Verified(G), ReaderEntered(G), END, END), BlockState.EVICTING),
    "one of two leaves": (
        (FirstBytes(G), Verified(G), ReaderEntered(G), ReaderEntered(G), END, ReaderLeft(G)),
        BlockState.EVICTING,
    ),
    "the last leaves": ((FirstBytes(G), Verified(G), ReaderEntered(G), END, ReaderLeft(G)), BlockState.FREE),
    "never came": ((END,), BlockState.QUARANTINED),
    "given up half-way": ((FirstBytes(G), END), BlockState.QUARANTINED),
    "still written": ((END, FirstBytes(G)), BlockState.QUARANTINED),
    "twice given up": ((END, END), BlockState.QUARANTINED),
    "proven quiet": ((FirstBytes(G), END, Quiesced(G)), BlockState.FREE),
}


@pytest.mark.parametrize("walk", WALKS)
def test_each_walk_ends_where_it_should(walk: str) -> None:
    events, state = WALKS[walk]
    assert after(*events).state is state


def test_the_walks_take_every_transition() -> None:
    taken = set()
    for events, _ in WALKS.values():
        block = Block(G)
        for event in events:
            taken.add((block.state, type(event)))
            block = step(block, event).ticket
    assert taken == set(TRANSITIONS)


def test_nobody_reads_what_is_not_whole() -> None:
    for events, state in WALKS.values():
        if state not in (BlockState.WHOLE, BlockState.FREE):
            with pytest.raises(IllegalTransition):
                step(after(*events), ReaderEntered(G))


def test_what_was_given_up_never_becomes_whole() -> None:
    with pytest.raises(IllegalTransition):
        step(after(FirstBytes(G), END), Verified(G))


def test_more_readers_cannot_leave_than_came() -> None:
    with pytest.raises(IllegalTransition, match="no readers"):
        step(after(FirstBytes(G), Verified(G)), ReaderLeft(G))


def test_the_unit_is_given_back_once_and_the_first_cause_is_kept() -> None:
    block = after(FirstBytes(G), Verified(G), ReaderEntered(G))
    ended = step(block, END)
    assert ended.effects == ()
    again = step(ended.ticket, Ended(G, Cause("given_up")))
    left = step(again.ticket, ReaderLeft(G))
    assert left.effects == (FreeUnit(),)
    assert left.ticket.cause == Cause("evicted")
    assert step(left.ticket, Quiesced(G)).outcome is Outcome.LATE


@given(st.lists(st.sampled_from((*EVENTS, *(replace(event, generation=G - 1) for event in EVENTS))), max_size=30))
def test_whatever_comes_a_unit_is_free_only_with_nobody_in_it(events: list[Event]) -> None:
    """A writer may be inside from the first bytes until they are verified or proven quiet."""
    block, writing, readers, freed = Block(G), True, 0, 0
    for event in events:
        try:
            moved = step(block, event)
        except IllegalTransition:
            continue
        if event.generation != G:
            assert moved.ticket == block
            continue
        if moved.outcome is Outcome.APPLIED:
            readers += isinstance(event, ReaderEntered) - isinstance(event, ReaderLeft)
            writing = writing and not isinstance(event, Verified | Quiesced)
            assert not (isinstance(event, ReaderEntered) and writing)
        block = moved.ticket
        freed += moved.effects.count(FreeUnit())
        assert block.readers == readers
        assert freed == (block.state is BlockState.FREE)
        if freed:
            assert not readers
            assert not writing
