"""The line keeps order, lets small ones past a bounded number of times, and starves nobody: checked against a pool that
hands out nothing by itself."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.line import Line, LineSettings, Place

RULES = LineSettings(passes=3, patience_s=50.0, reach=8)


@dataclass
class Pool:
    """Workers with so many pages. running: (end, worker, pages)."""

    total: dict[str, int]
    free: dict[str, int] = field(init=False)
    running: list[tuple[float, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = dict(self.total)

    def finish(self, now: float) -> None:
        for end, worker, pages in [r for r in self.running if r[0] <= now]:
            self.running.remove((end, worker, pages))
            self.free[worker] += pages


@dataclass
class Crowd:
    """Requests by place: (pages, how long). served: in order."""

    pool: Pool
    wants: dict[Place, tuple[int, float]] = field(default_factory=dict)
    served: list[Place] = field(default_factory=list)

    def advance(self, line: Line, now: float) -> None:
        self.pool.finish(now)

        def serve(place: Place, kept: frozenset[str]) -> bool:
            pages, hold_s = self.wants[place]
            for worker in sorted(self.pool.free):
                if worker not in kept and self.pool.free[worker] >= pages:
                    self.pool.free[worker] -= pages
                    self.pool.running.append((now + hold_s, worker, pages))
                    self.served.append(place)
                    return True
            return False

        def lacks(place: Place, kept: frozenset[str]) -> frozenset[str]:
            pages = self.wants[place][0]
            own = [w for w in self.pool.free if w in place.kept] or [w for w in self.pool.free if w not in kept]
            fit = [w for w in own if self.pool.total[w] >= pages]
            aim = max(fit, key=lambda w: (self.pool.free[w], w), default=None)
            return frozenset() if aim is None or self.pool.free[aim] >= pages else frozenset((aim,))

        line.advance(now, serve, lacks)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 10), st.integers(1, 6)), min_size=1, max_size=60),
    st.sampled_from([{"a": 10}, {"a": 10, "b": 10}, {"a": 10, "b": 4}]),
)
def test_everybody_is_served_and_nobody_is_passed_too_often(
    arrivals: list[tuple[int, int, int]], total: dict[str, int]
) -> None:
    crowd, line, now = Crowd(Pool(total)), Line(RULES), 0.0
    places: list[Place] = []
    for gap, pages, hold_s in arrivals:
        now += gap
        place = Place(now)
        places.append(place)
        crowd.wants[place] = (pages, hold_s)
        line.join(place)
        crowd.advance(line, now)
    for _ in range(60 * 7):  # at worst one after the other
        now += 1
        crowd.advance(line, now)
    assert len(line) == 0
    assert sorted(map(id, crowd.served)) == sorted(map(id, places))
    crowd.pool.finish(float("inf"))
    assert crowd.pool.free == total
    if len(total) == 1:  # with one worker to wait for, its room is kept after the last allowed pass
        assert max(place.passed for place in places) <= RULES.passes


@given(st.lists(st.integers(1, 10), min_size=1, max_size=8))
def test_equals_are_served_in_the_order_of_their_arrival(pages: list[int]) -> None:
    crowd, line = Crowd(Pool({"a": 10})), Line(RULES)
    places = [Place(float(i)) for i in range(len(pages))]
    for place in reversed(places):  # whatever the order in which they come in
        crowd.wants[place] = (max(pages), 1.0)
        line.join(place)
    for now in range(2 * len(pages)):
        crowd.advance(line, 100.0 + now)
    assert crowd.served == places


def test_the_smaller_priority_number_comes_first_and_within_it_who_came_first() -> None:
    crowd, line = Crowd(Pool({"a": 10})), Line(RULES)
    places = [Place(since, priority) for since, priority in ((1.0, 0), (2.0, 5), (3.0, -1), (4.0, 0), (5.0, -1))]
    for place in places:
        crowd.wants[place] = (10, 1.0)
        line.join(place)
    for now in range(2 * len(places)):
        crowd.advance(line, 100.0 + now)
    assert crowd.served == [places[index] for index in (2, 4, 0, 3, 1)]


def test_who_has_lost_its_workers_comes_before_everybody_and_is_never_passed() -> None:
    crowd, line = Crowd(Pool({"a": 10})), Line(RULES)
    crowd.pool.free["a"] = 6  # something else runs
    small, urgent, lost = Place(1.0), Place(2.0, -1), Place(9.0, 5)
    lost.lost_at = 10.0
    for place, pages in ((small, 1), (urgent, 1), (lost, 8)):
        crowd.wants[place] = (pages, 1.0)
        line.join(place)
    crowd.advance(line, 10.0)
    assert crowd.served == [], "the room is kept"
    crowd.pool.free["a"] += 4
    crowd.advance(line, 11.0)
    assert crowd.served == [lost, urgent, small]


def test_those_for_whom_there_is_no_worker_are_in_nobodys_way() -> None:
    line, served = Line(RULES), []
    stranded = [Place(float(k)) for k in range(2 * RULES.reach)]
    for place in stranded:
        place.lost_at, place.stranded = 5.0, True
        line.join(place)
        place.kept = frozenset({"a"})  # of an earlier wait
    new = Place(99.0)
    line.join(new)

    def serve(place: Place, kept: frozenset[str]) -> bool:
        if place.stranded or "a" in kept:
            return False
        served.append(place)
        return True

    line.advance(100.0, serve, lambda place, kept: frozenset())
    assert served == [new]


def test_who_comes_back_begins_with_nothing_kept() -> None:
    line, place = Line(RULES), Place(1.0)
    place.kept = frozenset({"a"})
    line.join(place)
    assert place.kept == frozenset()


def test_small_ones_pass_a_big_one_three_times_and_then_it_is_next() -> None:
    crowd, line = Crowd(Pool({"a": 10})), Line(RULES)
    crowd.pool.free["a"] = 6  # something else runs
    big = Place(0.0)
    crowd.wants[big] = (8, 1.0)
    line.join(big)
    small = [Place(1.0 + i) for i in range(6)]
    for place in small:
        crowd.wants[place] = (1, 100.0)
        line.join(place)
    crowd.advance(line, 10.0)
    assert crowd.served == small[:3], "in one go as well"
    crowd.advance(line, 11.0)
    assert crowd.served == small[:3], "three pages are free and kept"
    crowd.pool.free["a"] += 5
    crowd.advance(line, 12.0)
    assert crowd.served == [*small[:3], big]
    crowd.pool.free["a"] += 3
    crowd.advance(line, 13.0)
    assert crowd.served == [*small[:3], big, *small[3:]]


def test_patience_ends_by_time_too() -> None:
    crowd, line = Crowd(Pool({"a": 10})), Line(RULES)
    crowd.pool.free["a"] = 5
    big, small = Place(0.0), Place(49.0)
    for place, pages in ((big, 8), (small, 1)):
        crowd.wants[place] = (pages, 100.0)
        line.join(place)
    crowd.advance(line, 50.0)
    assert crowd.served == []
    line.leave(big)
    line.leave(big)
    crowd.advance(line, 50.0)
    assert crowd.served == [small], "a place that is given up keeps nothing"
