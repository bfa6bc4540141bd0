"""Claims on a worker: who waits for room is passed a bounded number of times, in an order that all workers share, and
nobody holds anything for long by asking once."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.runtime.errors import PoolExhausted
from shared.worker.admission import Claims, ClaimSettings, Need

RULES = ClaimSettings(passes=3, patience_s=50.0, expire_s=5.0, capacity=4)
TOTAL = Need(10, 10)


@dataclass
class Worker:
    """A pool behind claims."""

    claims: Claims = field(default_factory=lambda: Claims(RULES))
    held: dict[str, Need] = field(default_factory=dict)

    @property
    def free(self) -> Need:
        taken = sum(self.held.values(), Need(0, 0))
        return Need(TOTAL.pages - taken.pages, TOTAL.slots - taken.slots)

    def ask(self, name: str, pages: int, since: float, now: float, slots: int = 1) -> bool:
        need = Need(pages, slots)
        try:
            self.claims.check(name, need, since, self.free, now)
            if not need.fits(self.free):
                raise PoolExhausted
        except PoolExhausted:
            self.claims.leave(name, need, since, now)
            return False
        self.claims.entered(name, since, now)
        self.held[name] = need
        return True


def test_small_ones_pass_a_big_one_three_times_and_then_it_is_next() -> None:
    worker = Worker()
    assert worker.ask("first", 3, 0.0, 0.0)
    assert not worker.ask("big", 9, 1.0, 1.0)
    assert [worker.ask(f"small-{i}", 1, 2.0, 2.0) for i in range(5)] == [True, True, True, False, False]
    del worker.held["first"]
    assert not worker.ask("small-5", 1, 2.5, 2.5), "six pages are free, and kept"
    assert not worker.ask("big", 9, 1.0, 3.0)
    worker.held.clear()
    assert worker.ask("small-6", 1, 3.0, 3.0), "both fit"
    assert worker.ask("big", 9, 1.0, 3.5)
    del worker.held["small-6"]
    assert worker.ask("small-5", 1, 2.5, 3.6)


def test_slots_are_kept_like_pages() -> None:
    worker = Worker()
    assert worker.ask("first", 1, 0.0, 0.0, slots=3)
    assert not worker.ask("wide", 1, 0.0, 100.0, slots=8)
    assert not worker.ask("small", 1, 60.0, 100.0)


def test_the_older_one_is_never_kept_out_by_the_younger() -> None:
    worker = Worker()
    assert worker.ask("first", 5, 0.0, 0.0)
    assert not worker.ask("young", 8, 20.0, 100.0)
    assert worker.ask("old", 4, 10.0, 100.0), "young is due as well, but came later"
    assert not worker.ask("younger", 1, 30.0, 100.0)


def test_a_smaller_priority_number_comes_before_age() -> None:
    claims, full, need = Claims(RULES), Need(0, 0), Need(6, 1)
    claims.leave("old", need, 0.0, 60.0, priority=1)
    with pytest.raises(PoolExhausted):
        claims.check("young", need, 50.0, TOTAL, 60.0, priority=1)
    claims.check("urgent", need, 50.0, TOTAL, 60.0, priority=0)
    claims.leave("urgent", need, 1.0, 60.0, priority=0)
    with pytest.raises(PoolExhausted):
        claims.check("old", need, 0.0, full, 60.0, priority=1)
    claims.entered("young", 50.0, 60.0, priority=1)
    assert [claims._claims[name].passed for name in ("old", "urgent")] == [1, 1]


def test_who_stops_asking_keeps_nothing() -> None:
    worker = Worker()
    worker.ask("first", 5, 0.0, 0.0)
    assert not worker.ask("big", 8, 0.0, 100.0)
    assert not worker.ask("small", 1, 60.0, 104.9)
    assert worker.ask("small", 1, 60.0, 105.1)
    assert len(worker.claims) == 0


def test_a_request_does_not_stand_in_its_own_way() -> None:
    worker = Worker()
    worker.ask("first", 5, 0.0, 0.0)
    assert not worker.ask("big", 6, 0.0, 100.0)
    worker.held.clear()
    assert worker.ask("big", 6, 0.0, 100.0)


def test_two_workers_have_the_same_order_so_that_neither_keeps_what_the_other_needs() -> None:
    """A and B both need both workers. Whoever came first gets both."""
    one, other = Worker(), Worker()
    for worker in (one, other):
        worker.ask("first", 5, 0.0, 0.0)
    assert not one.ask("a", 8, 1.0, 100.0)
    assert not other.ask("b", 8, 2.0, 100.0)
    assert not one.ask("b", 8, 2.0, 100.0)
    assert not other.ask("a", 8, 1.0, 100.0)
    one.held.clear()
    other.held.clear()
    assert not one.ask("b", 8, 2.0, 101.0)
    assert not other.ask("b", 8, 2.0, 101.0)
    assert one.ask("a", 8, 1.0, 101.0)
    assert other.ask("a", 8, 1.0, 101.0)


def test_the_table_is_bounded_and_the_eldest_stay() -> None:
    worker = Worker()
    worker.ask("first", 10, 0.0, 0.0)
    for number in range(1000):
        worker.ask(f"r{number:04}", 5, 1000.0 - number, 1000.0)
    assert len(worker.claims) == RULES.capacity
    with pytest.raises(PoolExhausted):
        worker.claims.check("new", Need(1, 1), 999.0, Need(5, 5), 1000.0)
    worker.claims.check("new", Need(1, 1), 1.0, Need(5, 5), 1000.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), max_size=6), min_size=20, max_size=20))
def test_a_stream_that_never_ends_starves_nobody(stream: list[list[tuple[int, int]]]) -> None:
    """Small ones keep coming, and ask before the big one does, which came first."""
    worker = Worker(Claims(ClaimSettings(passes=5, patience_s=10.0, expire_s=3.0, capacity=64)))
    ends: dict[str, float] = {}
    waiting: dict[str, tuple[int, float, int]] = {}
    entered_at: float | None = None
    for now in range(60):
        for name in [n for n, end in ends.items() if end <= now]:
            del worker.held[name], ends[name]
        for number, (pages, hold_s) in enumerate(stream[now % len(stream)]):
            waiting[f"r{now:02}-{number}"] = (pages, float(now), hold_s)
        for name, (pages, since, hold_s) in reversed(list(waiting.items())):
            if worker.ask(name, pages, since, float(now)):
                ends[name] = now + hold_s
                del waiting[name]
        if entered_at is None and worker.ask("big", 10, 0.0, float(now)):
            ends["big"], entered_at = now + 3.0, now
        assert worker.free.pages >= 0
        assert len(worker.claims) <= 64
    assert entered_at is not None
    assert entered_at <= 10 + 6 + 1, "its patience, and what was running then"
