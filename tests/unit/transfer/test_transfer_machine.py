"""The receiving ticket's machine: its table, and that random orders of events never break its invariants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.machines import transfer as machine
from shared.machines.stepping import IllegalTransition, Outcome, Step
from shared.machines.transfer import (
    AnnounceFirstBytes,
    FenceRequested,
    ReceivingState,
    ReceivingTicket,
    ReportQuiesced,
    StopWriters,
    WriterEntered,
    WriterLeft,
    may_write,
    step,
)


def test_every_state_is_reachable_and_only_the_end_absorbs() -> None:
    reached = {ReceivingState.OPEN, *machine.TRANSITIONS.values(), *machine.SETTLED.values()}
    assert reached == set(ReceivingState)
    leaving = {state for state, _ in machine.TRANSITIONS}
    assert leaving == set(ReceivingState) - machine.TERMINAL


def test_every_living_state_can_be_fenced() -> None:
    for state in set(ReceivingState) - machine.TERMINAL:
        assert (state, FenceRequested) in machine.TRANSITIONS


def test_the_first_writer_is_announced_once() -> None:
    first = step(ReceivingTicket(1), WriterEntered(1))
    assert first.effects == (AnnounceFirstBytes(),)
    assert step(first.ticket, WriterEntered(1)).effects == ()


def test_an_idle_ticket_quiesces_at_once() -> None:
    done = step(ReceivingTicket(1), FenceRequested(1))
    assert done.ticket.state is ReceivingState.QUIESCED
    assert done.effects == (StopWriters(), ReportQuiesced())


def test_a_fence_waits_for_every_writer() -> None:
    ticket = ReceivingTicket(1)
    for event in (WriterEntered(1), WriterEntered(1), FenceRequested(1), WriterLeft(1)):
        ticket = step(ticket, event).ticket
    assert ticket.state is ReceivingState.FENCING
    assert not may_write(ticket)
    assert step(ticket, FenceRequested(1)).effects == ()
    assert step(ticket, WriterLeft(1)).effects == (ReportQuiesced(),)


def test_nobody_enters_a_closed_ticket() -> None:
    ticket = step(step(ReceivingTicket(1), WriterEntered(1)).ticket, FenceRequested(1)).ticket
    with pytest.raises(IllegalTransition):
        step(ticket, WriterEntered(1))


def test_nobody_leaves_who_did_not_enter() -> None:
    with pytest.raises(IllegalTransition):
        step(ReceivingTicket(1), WriterLeft(1))


def test_another_generation_and_the_end_change_nothing() -> None:
    ticket = ReceivingTicket(2)
    assert step(ticket, FenceRequested(1)) == Step(ticket, outcome=Outcome.STALE)
    ended = step(ticket, FenceRequested(2)).ticket
    for event in (WriterEntered(2), WriterLeft(2), FenceRequested(2)):
        assert step(ended, event) == Step(ended, outcome=Outcome.LATE)


@given(st.lists(st.sampled_from(["enter", "leave", "fence", "stale"]), max_size=40))
def test_quiesced_means_nobody_is_inside(events: list[str]) -> None:
    ticket, inside, reported = ReceivingTicket(1), 0, 0
    for name in events:
        if name == "enter" and may_write(ticket):
            ticket, inside = step(ticket, WriterEntered(1)).ticket, inside + 1
        elif name == "leave" and inside:
            moved = step(ticket, WriterLeft(1))
            ticket, inside = moved.ticket, inside - 1
            reported += ReportQuiesced() in moved.effects
        elif name == "fence":
            moved = step(ticket, FenceRequested(1))
            ticket = moved.ticket
            reported += ReportQuiesced() in moved.effects
        elif name == "stale":
            assert step(ticket, WriterLeft(7)).ticket == ticket
        quiesced = ticket.state is ReceivingState.QUIESCED
        assert ticket.writers == inside
        assert reported == quiesced
        assert not (quiesced and inside)
        assert not (quiesced and may_write(ticket))
