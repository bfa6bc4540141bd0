"""The machines of gateway, P, D and door together, on a network that may do what it likes: no page is lost, shared or
written by a stranger, a ticket commits once, and the client sees each right token once.

HYPOTHESIS_PROFILE=deep looks further.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.machines import decode, prefill, request
from shared.machines.stepping import Cause, Outcome
from tests.machines.handoff_parts import (
    D_PAGES,
    DECODE,
    NUM_TOKENS,
    NUM_UNITS,
    P_PAGES,
    PREFILL,
    D,
    P,
    right_token,
)
from tests.machines.handoff_world import World

SIDES = st.sampled_from([DECODE, PREFILL])


class Handoff(RuleBasedStateMachine):
    @initialize()
    def a_request_arrives(self) -> None:
        self.world = World()
        self.world.begin_attempt()

    # What goes right

    @rule(steps=st.integers(1, 12))
    def proceed(self, steps: int) -> None:
        for _ in range(steps):
            if not self.world.proceed():
                break

    @rule()
    def what_waits_is_repeated(self) -> None:
        world = self.world
        if world.attempt is not None and world.attempt.state is request.RequestState.GRANTING:
            world.repeat_orders()
        world.d_publishes()
        world.p_commits()

    # What the network may do

    @precondition(lambda self: self.world.network)
    @rule(data=st.data())
    def deliver_out_of_order(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.world.network) - 1))
        self.world.deliver(self.world.network.pop(place))

    @precondition(lambda self: self.world.network)
    @rule(data=st.data())
    def duplicate(self, data: st.DataObject) -> None:
        """The copy comes last of all: later than every retry."""
        place = data.draw(st.integers(0, len(self.world.network) - 1))
        self.world.network.append(self.world.network[place])

    @precondition(lambda self: self.world.network)
    @rule(data=st.data())
    def deliver_twice(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.world.network))
        self.world.deliver(message)

    @precondition(lambda self: self.world.network)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.world.network.pop(data.draw(st.integers(0, len(self.world.network) - 1)))

    @rule()
    def delay_everything(self) -> None:
        """What is under way arrives after what is sent from now on, and meanwhile the attempt is given up."""
        waiting, self.world.network = self.world.network, []
        self.world.end_attempt(Cause("peer_lost", by=DECODE))
        for _ in range(8):
            self.world.proceed()
        self.world.network += waiting

    # What processes and clients may do

    @rule()
    def the_client_leaves(self) -> None:
        self.world.end_attempt(Cause("cancelled"))

    @rule(side=SIDES)
    def a_timer_fires(self, side: str) -> None:
        self.world.times_out(side)

    @rule(side=SIDES)
    def a_worker_crashes(self, side: str) -> None:
        self.world.crash(side)

    @rule()
    def a_writer_is_slow(self) -> None:
        """It writes one unit more, whatever happened meanwhile."""
        self.world.writer_writes()

    @rule()
    def a_step_begins(self) -> None:
        self.world.d_begins_a_step()

    @rule()
    def pages_run_out(self) -> None:
        self.world.d_preempts()

    # What holds always

    @invariant()
    def pages_are_conserved(self) -> None:
        for books, total in ((self.world.d.books, D_PAGES), (self.world.p.books, P_PAGES)):
            assert books.free + books.held == total

    @invariant()
    def a_page_has_one_owner_and_only_while_its_ticket_lives(self) -> None:
        d, p = self.world.d, self.world.p
        owned = 0 if d.ticket is None else d.books.held_by(d.ticket.generation)
        assert d.books.held == owned
        if d.ticket is not None:
            assert (owned == 0) == (not d.pages)
            assert d.pages or d.ticket.state in (D.PREEMPTED, D.QUARANTINED)
        assert p.books.held == (0 if p.ticket is None else p.books.held_by(p.ticket.generation))

    @invariant()
    def a_ticket_commits_once(self) -> None:
        assert all(count == 1 for count in self.world.commits.values())

    @invariant()
    def what_decodes_is_its_own_state(self) -> None:
        d = self.world.d
        if d.ticket is not None and d.ticket.state in (D.COMMITTED, D.STARTED):
            assert {d.content.get(page) for page in d.pages[:-1]} == {d.ticket.generation}

    @invariant()
    def no_page_is_free_while_somebody_may_touch_it(self) -> None:
        d, p = self.world.d, self.world.p
        if d.writers or d.in_step:
            assert d.ticket is not None
            assert d.books.held_by(d.ticket.generation)
            assert {writer.generation for writer in d.writers} <= {d.ticket.generation}
        if p.reading is not None:
            assert p.ticket is not None
            assert p.books.held_by(p.reading) == NUM_UNITS

    @invariant()
    def the_client_sees_each_right_token_once(self) -> None:
        assert self.world.emitted == [right_token(index) for index in range(len(self.world.emitted))]
        assert len(self.world.emitted) <= NUM_TOKENS

    @invariant()
    def an_attempt_that_has_emitted_says_so(self) -> None:
        attempt = self.world.attempt
        assert attempt is None or attempt.emitted == (len(self.world.emitted) > self.world.history_len)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.calm_down()
            assert self.world.d.ticket is None or self.world.d.ticket.state in decode.TERMINAL
            assert self.world.p.ticket is None or self.world.p.ticket.state in prefill.TERMINAL
            assert (self.world.d.books.free, self.world.p.books.free) == (D_PAGES, P_PAGES)


TestHandoff = Handoff.TestCase


def test_undisturbed_the_model_serves_the_request() -> None:
    """The model is no vacuum: without faults it comes to the end, and all is free again."""
    world = World()
    states = []
    while world.proceed():
        if world.d.ticket is not None and world.d.ticket.state not in states:
            states.append(world.d.ticket.state)
    assert world.emitted == [right_token(index) for index in range(NUM_TOKENS)]
    assert states == [D.RESERVED, D.FILLING, D.STARTED, D.QUARANTINED]
    assert world.commits == {1: 1}
    assert set(world.outcomes) <= {Outcome.APPLIED, Outcome.LATE}


@pytest.mark.parametrize("num_tokens", range(1, NUM_TOKENS))
def test_the_attempt_after_a_loss_goes_on_behind_what_the_client_has(num_tokens: int) -> None:
    world = World()
    while len(world.emitted) < num_tokens:
        world.proceed()
    world.crash(DECODE)
    while world.proceed():
        pass
    assert (world.generation, world.history_len) == (2, num_tokens)
    assert world.emitted == [right_token(index) for index in range(NUM_TOKENS)]
    assert world.commits == {1: 1, 2: 1}


@pytest.mark.parametrize("side", [DECODE, PREFILL])
def test_a_late_commit_of_an_earlier_attempt_changes_nothing(side: str) -> None:
    """Found by the walk with the fence off, and kept: all bytes of the first attempt landed, its record comes late."""
    world = World()
    while world.p.ticket is None or world.p.ticket.state is not P.COMMITTING:
        world.proceed()
    record = next(message for message in world.network if message.kind == "commit")
    world.network.clear()
    world.times_out(side)
    world.end_attempt(Cause("peer_lost"))
    while world.d.ticket is None or world.d.ticket.generation != 2:
        world.proceed()
    world.deliver(record)
    world.d_matches()
    assert world.d.ticket.state is D.RESERVED
    assert world.commits == {}
