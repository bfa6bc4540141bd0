"""What must hold for every machine's table, whatever the events: reachability, exits, absorption, fencing."""

from dataclasses import replace
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from shared.machines import block, decode, prefill, request, stepping
from shared.machines.stepping import Cause, Event, IllegalTransition, Outcome

MACHINES: dict[str, tuple[ModuleType, Any]] = {
    "block": (block, block.Block(3)),
    "decode": (decode, decode.DecodeTicket(1, 3, remote=True)),
    "prefill": (prefill, prefill.PrefillTicket(1, 3)),
    "request": (request, request.Attempt(1, 3)),
}


def events_of(machine: ModuleType) -> list[type[Event]]:
    return sorted({event for _, event in machine.TRANSITIONS}, key=lambda e: e.__name__)


def states_of(ticket: Any) -> type[Enum]:
    return type(ticket.state)


def make(event: type[Event], generation: int = 3) -> Event:
    return event(generation, Cause("cancelled")) if event.__name__ == "Ended" else event(generation)  # type: ignore[call-arg]


@pytest.fixture(params=sorted(MACHINES))
def named(request: pytest.FixtureRequest) -> tuple[ModuleType, Any]:
    return MACHINES[request.param]


def test_every_state_is_reachable(named: tuple[ModuleType, Any]) -> None:
    machine, ticket = named
    seen, frontier = {ticket.state}, [ticket.state]
    while frontier:
        state = frontier.pop()
        for (source, _), target in machine.TRANSITIONS.items():
            if source is state and target not in seen:
                seen.add(target)
                frontier.append(target)
    assert seen == set(states_of(ticket))


def test_every_living_state_can_be_ended_and_terminal_ones_have_no_row(named: tuple[ModuleType, Any]) -> None:
    machine, ticket = named
    for state in states_of(ticket):
        if state in machine.TERMINAL:
            assert not [key for key in machine.TRANSITIONS if key[0] is state]
        else:
            assert (state, machine.Ended) in machine.TRANSITIONS


def test_terminal_states_absorb_every_event(named: tuple[ModuleType, Any]) -> None:
    machine, ticket = named
    for state in machine.TERMINAL:
        ended = replace(ticket, state=state)
        for event in events_of(machine):
            step = machine.step(ended, make(event))
            assert (step.ticket, step.effects, step.outcome) == (ended, (), Outcome.LATE)


@pytest.mark.parametrize("generation", [1, 2, 4])
def test_another_generation_changes_nothing(named: tuple[ModuleType, Any], generation: int) -> None:
    machine, ticket = named
    for state in states_of(ticket):
        for event in events_of(machine):
            held = replace(ticket, state=state)
            step = machine.step(held, make(event, generation))
            assert (step.ticket, step.effects, step.outcome) == (held, (), Outcome.STALE)


def test_a_missing_cell_raises_and_changes_nothing(named: tuple[ModuleType, Any]) -> None:
    machine, ticket = named
    missing = 0
    for state in states_of(ticket):
        for event in events_of(machine):
            if state not in machine.TERMINAL and (state, event) not in machine.TRANSITIONS:
                with pytest.raises(IllegalTransition, match=event.__name__):
                    machine.step(replace(ticket, state=state), make(event))
                missing += 1
    assert missing > 0


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_pages_come_free_only_through_the_quarantine_and_its_proof(name: str) -> None:
    machine, _ = MACHINES[name]
    into_terminal = {key for key, target in machine.TRANSITIONS.items() if target in machine.TERMINAL}
    quarantine = decode.DecodeState.QUARANTINED if name == "decode" else prefill.PrefillState.RELEASING
    assert into_terminal == {(quarantine, machine.Quiesced)}
    assert all(
        target in (quarantine, *machine.TERMINAL) for (s, _), target in machine.TRANSITIONS.items() if s is quarantine
    )


def test_the_first_cause_is_kept() -> None:
    for machine, ticket in (MACHINES["decode"], MACHINES["prefill"]):
        first = machine.step(ticket, machine.Ended(3, Cause("transfer_failed", "first"))).ticket
        second = machine.step(first, machine.Ended(3, Cause("cancelled", "second")))
        assert second.ticket.cause == Cause("transfer_failed", "first")
        assert second.effects == ()


def test_outcomes_are_told_apart() -> None:
    assert stepping.Cause("finished").failed is False
    assert stepping.Cause("cancelled").failed is False
    assert stepping.Cause("corrupt_state").failed is True


def test_a_prompt_computed_ahead_sends_nothing_before_its_destination_and_comes_back_for_it() -> None:
    ticket = prefill.PrefillTicket(1, 3)
    seen = []
    for event in (
        prefill.BegunAhead,
        prefill.ComputedAhead,
        prefill.Yielded,
        prefill.DestinationArrived,
        prefill.Returned,
        prefill.AllSent,
    ):
        step = prefill.step(ticket, event(3))
        ticket = step.ticket
        assert step.effects == ()
        seen.append(ticket.state.value)
    assert seen == ["ahead", "parked", "yielded", "returning", "computing", "committing"]


@pytest.mark.parametrize("state", [prefill.PrefillState(name) for name in ("ahead", "parked", "yielded", "returning")])
def test_a_prompt_computed_ahead_cannot_be_sent_or_committed_where_it_is(state: prefill.PrefillState) -> None:
    ticket = replace(prefill.PrefillTicket(1, 3), state=state)
    for event in (prefill.AllSent(3), prefill.CommitAnswered(3)):
        with pytest.raises(IllegalTransition):
            prefill.step(ticket, event)
