"""What goes into a step, seen on the plans themselves."""

from itertools import pairwise
from typing import Any

import pytest

from shared.engine.api import EngineStats
from shared.engine.batch import Arrival, CopyPage, CopySlot, StepPlan, StepResult
from shared.engine.capacity import Capacity
from shared.engine.models.toy import Toy
from shared.engine.sampler import Sampled
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Choice, Group, Phase
from shared.engine.settings import EngineSettings, plan_layout
from shared.engine.stash import Stash
from shared.protocol.messages import FinishReason, FirstToken, SamplingSpec
from shared.runtime.errors import PoolExhausted
from shared.transfer.link import TicketKey


class Books:
    """A scheduler without an engine: every sample is token 7."""

    def __init__(self, **settings: Any) -> None:
        sizes = {"num_pages": 128, "page_tokens": 4, "prefill_chunk": 8} | settings
        chosen = EngineSettings(**sizes)
        layout = plan_layout(Toy(), chosen)
        self.cleared: list[int] = []
        self.capacity = Capacity(layout, chosen.growth_tokens, self.cleared.append)
        self.stash = Stash(layout, chosen.stash_bytes)
        self.stats = EngineStats()
        self.scheduler = Scheduler(layout, chosen, self.capacity, self.stash, frozenset({255}), self.stats)

    def reserve(self, number: int, length: int, *, decodes: bool = False, n: int = 1, max_tokens: int = 50) -> Group:
        sampling = SamplingSpec(n=n, max_tokens=max_tokens)
        choices = [Choice(index) for index in range(n)]
        group = Group(TicketKey(number, 1), tuple(range(length)), sampling, decodes, max_tokens, choices)
        self.scheduler.reserve(group)
        return group

    def prompt(self, number: int, length: int, *, decodes: bool = False, n: int = 1) -> Group:
        group = self.reserve(number, length, decodes=decodes, n=n)
        self.scheduler.start_prompt(group)
        return group

    def decoding(self, number: int, length: int, n: int = 1) -> Group:
        group = self.reserve(number, length, decodes=True, n=n)
        self.scheduler.start_prefilled(group, tuple(FirstToken(choice=c, token=7) for c in range(n)))
        return group

    def plan(self) -> StepPlan:
        plan, _ = self.scheduler.schedule()
        assert plan is not None
        return plan

    def step(self) -> list[tuple[int, int, int]]:
        """Runs a step; (room, start, end) of its rows."""
        plan = self.plan()
        self.scheduler.apply(plan, StepResult(tuple(tuple(Sampled(7, None) for _ in row.samples) for row in plan.rows)))
        return [(row.key.room, row.start, row.end) for row in plan.rows]


def test_prompts_share_a_step_up_to_its_limit_those_with_least_left_first() -> None:
    books = Books(max_step_tokens=20, prefill_lead=100)
    books.prompt(1, 20)
    books.prompt(2, 10)
    books.prompt(3, 10)
    assert books.step() == [(2, 0, 8), (3, 0, 8)]
    assert books.step() == [(2, 8, 10), (3, 8, 10), (1, 0, 8)]
    assert books.step() == [(1, 8, 16)]
    assert books.step() == [(1, 16, 20)]
    assert books.scheduler.schedule()[0] is None


def test_a_chunk_larger_than_the_limit_runs_alone() -> None:
    books = Books(max_step_tokens=2)
    books.prompt(1, 8)
    books.prompt(2, 8)
    assert books.step() == [(1, 0, 8)]
    assert books.step() == [(2, 0, 8)]


def test_all_choices_decode_each_step_beside_at_most_one_chunk() -> None:
    books = Books(prefill_lead=100, max_step_tokens=1000)
    books.decoding(1, 5, n=2)
    books.decoding(2, 6)
    books.prompt(3, 12, decodes=True)
    books.prompt(4, 12, decodes=True)
    decodes = [(1, 5, 6), (1, 5, 6), (2, 6, 7)]
    assert books.step() == [*decodes, (3, 0, 8)]
    assert books.step() == [*((room, a + 1, b + 1) for room, a, b in decodes), (3, 8, 12)]
    rows = books.step()
    assert (3, 12, 13) in rows
    assert rows[-1] == (4, 0, 8)


def test_a_consumer_that_lags_holds_up_its_own_prompt_only() -> None:
    books = Books(max_step_tokens=8, prefill_lead=1)
    slow = books.prompt(1, 16)
    books.prompt(2, 24)
    assert books.step() == [(1, 0, 8)]
    assert books.step() == [(2, 0, 8)]
    slow.ahead -= 1
    assert books.step() == [(1, 8, 16)]


def test_choices_share_full_pages_and_copy_the_rest_before_they_run() -> None:
    books = Books(growth_tokens=4)
    group = books.decoding(1, 10, n=3)
    plan = books.plan()
    tables = [row.pages for row in plan.rows]
    assert len({pages[:2] for pages in tables}) == 1
    assert len({page for pages in tables for page in pages[2:]}) == 3 * 2
    slots = [row.slot for row in plan.rows]
    assert plan.copies[0] == Arrival(tables[0][:3], (slots[0],))
    assert set(plan.copies[1:]) == {
        CopySlot(slots[0], slots[1]),
        CopySlot(slots[0], slots[2]),
        CopyPage(tables[0][2], tables[1][2]),
        CopyPage(tables[0][2], tables[2][2]),
    }
    assert group.copies == []
    assert books.capacity.pages.held == 2 + 3 * 2


def test_a_prompt_of_whole_pages_needs_no_page_copied() -> None:
    books = Books()
    books.decoding(1, 8, n=2)
    assert [type(copy) for copy in books.plan().copies] == [Arrival, CopySlot]


def test_sampling_positions_are_the_same_on_both_sides() -> None:
    """Output k is drawn under position N + k."""
    books = Books()
    books.prompt(1, 6, n=2)
    [row] = books.plan().rows
    assert [(s.choice, s.position, s.output_ids) for s in row.samples] == [(0, 6, ()), (1, 6, ())]
    books = Books()
    books.decoding(1, 6, n=2)
    rows = books.plan().rows
    assert [(r.tokens, r.start) for r in rows] == [((7,), 6), ((7,), 6)]
    assert [(s.choice, s.position, s.output_ids) for r in rows for s in r.samples] == [(0, 7, (7,)), (1, 7, (7,))]


def test_the_slot_that_receives_state_is_cleared_when_it_is_taken() -> None:
    books = Books()
    group = books.reserve(1, 6, decodes=True, n=2)
    assert books.cleared == [group.trunk_slot]


def test_a_reservation_takes_the_prompt_and_the_first_steps_of_each_choice() -> None:
    books = Books(growth_tokens=6)
    books.reserve(1, 10, decodes=True, n=2, max_tokens=50)  # 2 full pages, and positions 8..15 twice
    assert (books.capacity.pages.held, books.capacity.slots.held) == (2 + 2 * 2, 2)
    books.reserve(2, 10, decodes=True, n=1, max_tokens=3)  # positions 0..11
    assert books.capacity.pages.held == 6 + 3
    books.reserve(3, 10, n=4)  # P: one sequence whatever n is
    assert (books.capacity.pages.held, books.capacity.slots.held) == (9 + 3, 2 + 1 + 1)


def test_a_choice_stopped_before_its_siblings_copied_from_it_keeps_its_pages_until_then() -> None:
    books = Books(growth_tokens=4)
    group = books.decoding(1, 10, n=2)
    mine = list(group.choices[0].pages)
    books.scheduler.finish_choice(group, 0)
    plan = books.plan()
    assert CopyPage(mine[2], group.choices[1].pages[2]) in plan.copies
    assert all(books.capacity.pages.is_held(page) for page in mine)
    books.scheduler.apply(plan, StepResult(((Sampled(7, None),),)))
    assert [books.capacity.pages.is_held(page) for page in mine] == [True, True, False, False]
    assert books.capacity.slots.held == 1


def test_a_choice_stopped_during_a_step_keeps_its_pages_until_the_step_is_over() -> None:
    books = Books()
    group = books.decoding(1, 10, n=2)
    books.step()
    held = books.capacity.pages.held
    plan = books.plan()
    books.scheduler.finish_choice(group, 1)
    assert (books.capacity.pages.held, books.capacity.slots.held) == (held, 2)
    effects = books.scheduler.apply(plan, StepResult(((Sampled(7, None),),) * 2))
    assert [out.choice for out in effects.tokens] == [0]
    assert books.capacity.pages.held < held
    assert books.capacity.slots.held == 1


def test_what_was_taken_for_choices_that_ended_at_once_is_given_back() -> None:
    books = Books(growth_tokens=6)
    group = books.reserve(1, 10, decodes=True, n=3)
    ended = tuple(FirstToken(choice=c, token=7, finish=FinishReason.STOP if c < 2 else None) for c in range(3))
    books.scheduler.start_prefilled(group, ended)
    assert books.capacity.pages.held == 4
    assert books.capacity.slots.held == 1
    assert books.step() == [(1, 10, 11)]


def test_recomputing_after_preemption_keeps_to_the_chunk_borders_and_samples_nothing_twice() -> None:
    books = Books(num_pages=17, growth_tokens=1, prefill_chunk=8)
    old = books.decoding(1, 11)
    young = books.decoding(2, 11)
    while young.phase is not Phase.PREEMPTED:
        books.step()
    outputs = list(young.choices[0].outputs)
    assert len(outputs) > 10
    books.scheduler.retire(old)
    known = 11 + len(outputs)
    steps = []
    while young.choices[0].outputs == outputs:
        steps += books.step()
    borders = [0, 8, 11, *range(16, known, 8), known]
    assert steps == [(2, a, b) for a, b in pairwise(borders)]


def test_a_long_request_comes_back_with_less_growth_where_the_pool_is_small() -> None:
    books = Books(num_pages=12, growth_tokens=16)
    group = books.reserve(1, 11, decodes=True)
    books.capacity.drop(group)
    group.choices[0].outputs = [7] * 30  # 40 positions to recompute and one to go on: 11 of 12 pages
    assert books.capacity.try_readmit(group, headroom=0)
    assert books.capacity.pages.held == 11
    books.capacity.drop(group)
    group.choices[0].outputs = [7] * 40
    with pytest.raises(PoolExhausted, match="13 pages are needed"):
        books.capacity.try_readmit(group, headroom=0)


def test_a_preempted_request_leaves_a_page_for_each_running_choice() -> None:
    books = Books(num_pages=10, growth_tokens=2)
    books.decoding(1, 4)  # 2 pages
    young = books.decoding(2, 14)  # 4 pages
    young.phase = Phase.PREEMPTED
    books.capacity.drop(young)
    others = books.capacity.pages.take(4, "others")
    assert books.step() == [(1, 4, 5)]  # exactly 4 are free, and the running one may soon want one of them
    books.capacity.pages.give_back(others[:1], "others")
    assert books.step() == [(1, 5, 6), (2, 0, 8)]


def test_copies_that_are_still_due_are_carried_out_before_a_group_is_copied_away() -> None:
    """It gave way before its first step: its siblings' pages are not theirs yet."""
    books = Books(num_pages=9, growth_tokens=1, stash_bytes=1 << 20)
    old = books.decoding(1, 11)
    books.step()
    young = books.decoding(2, 10, n=2)
    taken = books.capacity.pages.take(books.capacity.pages.free, "others")
    assert (len(old.choices[0].pages) * 4, old.choices[0].computed) == (12, 12)
    due = list(young.copies)
    assert due
    plan = books.plan()
    assert [save.key for save in plan.saves] == [young.key]
    assert list(plan.copies) == due
    assert young.copies == []
    assert taken


def test_the_saved_units_are_those_that_carry_state_each_once() -> None:
    books = Books(num_pages=12, growth_tokens=8, stash_bytes=1 << 20)
    old = books.decoding(1, 4)
    young = books.decoding(2, 10, n=2)
    books.capacity.pages.take(books.capacity.pages.free, "others")
    old.choices[0].pages = old.choices[0].pages[:1]  # as if it had grown into all it was given
    tables = [list(choice.pages) for choice in young.choices]
    plan = books.plan()
    [save] = plan.saves
    assert list(save.pages) == [*tables[0][:3], tables[1][2]]
    assert [(place.choice, place.pages, place.computed) for place in save.saved.places] == [
        (0, (0, 1, 2), 10),
        (1, (0, 1, 3), 10),
    ]
    assert set(save.slots) == {choice.slot for choice in young.choices}
