"""Whose prompt a step computes and how much of it, in each mode: seen on the plans."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.batch import StepPlan, StepResult
from shared.engine.sampler import Sampled
from shared.engine.sequence import Group, Phase
from shared.engine.settings import EngineSettings
from shared.runtime.mode import Mode
from tests.unit.engine.test_scheduler import Books

MODES: tuple[Mode, ...] = ("separated", "colocated", "chunked")


def test_colocated_computes_prompts_whole_beside_every_running_choice() -> None:
    books = Books(mode="colocated", prefill_chunk=2, max_step_tokens=20)
    books.decoding(1, 5, n=2)
    books.prompt(2, 30, decodes=True)
    books.prompt(3, 9, decodes=True)
    books.prompt(4, 9, decodes=True)
    assert books.step() == [(1, 5, 6), (1, 5, 6), (3, 0, 9), (4, 0, 9)]
    rows = books.step()
    assert rows[-1] == (2, 0, 30), "longer than the limit, and cut all the same into one piece"
    assert [(room, start) for room, start, _ in rows[:-1]] == [(1, 6), (1, 6), (3, 9), (4, 9)]


def test_chunked_fills_the_budget_with_decodes_first_and_cuts_prompts_to_the_rest() -> None:
    books = Books(mode="chunked", step_tokens=16, max_running=16)
    books.decoding(1, 5, n=3)
    books.prompt(2, 20, decodes=True)
    books.prompt(3, 8, decodes=True)
    decodes = [(1, 5, 6)] * 3
    assert books.step() == [*decodes, (3, 0, 8), (2, 0, 5)]
    assert [row for row in books.step() if row[0] == 2] == [(2, 5, 17)], "16 less 3 choices, and less one of 3"


def test_separated_borders_are_multiples_of_the_chunk_whatever_runs_beside() -> None:
    books = Books(prefill_chunk=8, max_step_tokens=20)
    books.decoding(1, 5, n=3)
    books.prompt(2, 20, decodes=True)
    cuts = [row for _ in range(3) for row in books.step() if row[0] == 2]
    assert cuts == [(2, 0, 8), (2, 8, 16), (2, 16, 20)]


def test_what_somebody_computes_itself_is_no_passing() -> None:
    books = Books(prefill_chunk=8, max_step_tokens=16)
    groups = [books.prompt(number, length, decodes=True) for number, length in ((1, 20), (2, 8))]
    assert books.step() == [(2, 0, 8), (1, 0, 8)]
    assert [group.passed for group in groups] == [8, 0]


def test_a_long_prompt_is_passed_by_as_much_as_it_has_left_and_no_more() -> None:
    """Short ones keep coming; it is two chunks long."""
    books = Books(prefill_chunk=8, max_step_tokens=8)
    books.prompt(1, 16, decodes=True)
    served = []
    for number in range(2, 8):
        group = books.prompt(number, 8, decodes=True)
        group.max_new = 1  # it ends with its prompt
        served += books.step()
    assert served == [(2, 0, 8), (3, 0, 8), (1, 0, 8), (1, 8, 16), *served[4:]]
    prompts = [row for row in served[4:] if row[0] != 1]
    assert prompts == [(4, 0, 8), (5, 0, 8)], "and the others after it, in the order in which they came"


@pytest.mark.parametrize(("deadlines", "first"), [((9.0, 9.0, 9.0), 1), ((9.0, 8.0, 7.0), 3), ((9.0, 5.0, 7.0), 2)])
def test_who_is_due_comes_in_the_order_of_the_deadlines_and_then_of_the_start(
    deadlines: tuple[float, ...], first: int
) -> None:
    books = Books(prefill_chunk=8, max_step_tokens=8)
    for number, deadline in enumerate(deadlines, start=1):
        group = books.prompt(number, 24 - number, decodes=True)
        group.passed, group.deadline = 24, deadline
    assert books.step() == [(first, 0, 8)]


def test_a_smaller_priority_number_comes_first_however_much_is_left_or_due() -> None:
    books = Books(prefill_chunk=8, max_step_tokens=8)
    for number, priority, length in ((1, 1, 8), (2, -1, 16), (3, 0, 8), (4, -1, 8)):
        books.prompt(number, length, decodes=True).priority = priority
    books.scheduler.groups[next(key for key in books.scheduler.groups if key.room == 1)].passed = 1000
    prompts = [row for _ in range(5) for row in books.step() if row[2] - row[1] > 1]
    assert prompts == [(4, 0, 8), (2, 0, 8), (2, 8, 16), (3, 0, 8), (1, 0, 8)]


def test_a_request_that_is_tried_again_is_not_passed_anew() -> None:
    """It started last, and its deadline is the earliest: those with later ones pass it as much as it has left."""
    books = Books(prefill_chunk=8, max_step_tokens=8)
    for number in (1, 2, 3):
        books.prompt(number, 8, decodes=True).deadline = 10.0 + number
    books.prompt(4, 16, decodes=True).deadline = 5.0
    assert [books.step()[-1] for _ in range(5)] == [(1, 0, 8), (2, 0, 8), (4, 0, 8), (4, 8, 16), (3, 0, 8)]


@pytest.mark.parametrize("name", ["step_tokens", "max_step_tokens"])
def test_a_setting_that_cannot_be_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        EngineSettings(num_pages=8, **{name: 0})
    with pytest.raises(ValueError, match=r"step_tokens \(31\) is below max_running \(32\)"):
        EngineSettings(num_pages=8, mode="chunked", step_tokens=31, max_running=32)


@dataclass
class Arrivals:
    """Runs random arrivals to their end on a scheduler without an engine and checks every plan. waited: tokens that
    those with later deadlines computed in steps in which a group could have computed something and did not."""

    books: Books
    limit: int
    waiting: dict[int, Group] = field(default_factory=dict)
    waited: dict[int, int] = field(default_factory=dict)
    deadlines: dict[int, float] = field(default_factory=dict)

    def step(self) -> bool:
        behind = {room: group.computed for room, group in self.waiting.items() if group.phase is Phase.PROMPT}
        plan, _ = self.books.scheduler.schedule()
        if plan is None:
            return False
        self.check(plan, behind)
        samples = tuple(tuple(Sampled(7, None) for _ in row.samples) for row in plan.rows)
        self.books.scheduler.apply(plan, StepResult(samples))
        for room, group in list(self.waiting.items()):
            group.ahead = 0  # its consumer keeps up
            if group.phase is Phase.ENDED:
                self.books.scheduler.retire(group)
                del self.waiting[room]
        return True

    def check(self, plan: StepPlan, behind: dict[int, int]) -> None:
        settings = self.books.scheduler._settings
        decodes = [row for row in plan.rows if row.choice is not None and len(row.tokens) == 1]
        parts = [row for row in plan.rows if row not in decodes]
        if settings.mode == "chunked":
            assert plan.num_tokens <= settings.step_tokens
        elif len(parts) > 1:
            assert plan.num_tokens <= settings.max_step_tokens
        for row in parts:
            if settings.mode == "separated":
                assert row.start % settings.prefill_chunk == 0 or row.choice is not None
                assert row.end % settings.prefill_chunk == 0 or row.samples or row.choice is not None
                assert not decodes or len(parts) == 1
            elif settings.mode == "colocated" and row.choice is None:
                assert (row.start, row.end) == (0, len(self.waiting[row.key.room].prompt))
        computed = {row.key.room: len(row.tokens) for row in parts}
        for room in behind:
            if room not in computed:
                self.waited[room] = self.waited.get(room, 0) + sum(
                    n for k, n in computed.items() if self.is_later(k, room)
                )
                assert self.waited[room] <= self.waiting[room].prompt_len + self.limit

    def is_later(self, other: int, room: int) -> bool:
        deadlines = [self.deadlines[each] for each in (other, room)]
        return deadlines[0] > deadlines[1] or (deadlines[0] == deadlines[1] and other > room)


requests = st.lists(
    st.tuples(
        st.integers(1, 60), st.integers(1, 3), st.integers(1, 6), st.integers(0, 3), st.sampled_from([0, 0, 2, 9])
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("mode", MODES)
@given(requests=requests, chunk=st.sampled_from([4, 8, 16]), decodes=st.booleans(), budget=st.integers(8, 24))
def test_whatever_arrives_the_budget_holds_and_nobody_starves(
    mode: Mode, requests: list[tuple[int, int, int, int, int]], chunk: int, decodes: bool, budget: int
) -> None:
    """Each request comes some steps after the one before it, for P or for D, with n choices; some are older than they
    seem."""
    sizes = {"num_pages": 2000, "growth_tokens": 4, "max_running": 8, "prefill_chunk": chunk, "step_tokens": budget}
    books = Books(mode=mode, max_step_tokens=2 * chunk, **sizes)
    arrivals = Arrivals(books, max(2 * chunk, 60))
    for room, (length, n, max_tokens, pause, age) in enumerate(requests, start=1):
        while books.capacity.slots.free < n:
            assert arrivals.step()
        group = books.reserve(room, length, decodes=decodes, n=n, max_tokens=max_tokens)
        group.deadline = arrivals.deadlines[room] = 100.0 + room - age
        books.scheduler.start_prompt(group)
        arrivals.waiting[room] = group
        for _ in range(pause):
            arrivals.step()
    while arrivals.waiting:
        assert arrivals.step(), "somebody waits and nothing is computed"
    assert (books.capacity.pages.held, books.capacity.slots.held) == (0, 0)
    assert not books.scheduler.groups


@pytest.mark.parametrize("mode", MODES)
def test_catching_up_after_preemption_keeps_to_the_mode(mode: Mode) -> None:
    books = Books(mode=mode, num_pages=17, growth_tokens=1, prefill_chunk=8, max_running=8, step_tokens=8)
    old = books.decoding(1, 11)
    young = books.decoding(2, 11)
    while young.phase is not Phase.PREEMPTED:
        books.step()
    known = 11 + len(young.choices[0].outputs)
    books.scheduler.retire(old)
    steps = []
    while not steps or steps[-1][2] < known:
        steps += books.step()
    if mode == "colocated":
        assert steps == [(2, 0, 11), (2, 11, known)]
    elif mode == "separated":
        assert all(end % 8 == 0 or end in (11, known) for _, _, end in steps)
    else:
        assert max(end - start for _, start, end in steps) == 8
        assert steps[0] == (2, 0, 8)
