"""The scheduler of bursts against plain statements of what it promises, on made-up loads and links of its own time."""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.transfer.classes import RANKS, Flow, Rules, Scheduler, Standing, TrafficClass

LAST, HANDOFF, RECOVERY, BACKGROUND = TrafficClass
BURST = 1000
RATE = 100_000.0
NOBODY_OWED = dict.fromkeys(TrafficClass, 0.0)


@dataclass(frozen=True)
class Transfer:
    """Comes up at a time and sends bursts of these sizes."""

    at: float
    link: str
    standing: Standing
    sizes: tuple[int, ...]


@dataclass
class Grant:
    at: float
    asked_at: float
    flow: Flow
    size: int
    others: list[tuple[str, int, int, int, bool]]
    """(link, rank, priority, number, whether it waits) of the others that had something to send, at that time."""


@dataclass
class World:
    """Links that each carry one burst after the other at RATE; a burst under way takes until it has passed."""

    scheduler: Scheduler
    grants: list[Grant] = field(default_factory=list)
    now: float = 0.0
    left: dict[Flow, list[int]] = field(default_factory=dict)
    asked_at: dict[Flow, float] = field(default_factory=dict)
    free_at: dict[str, float] = field(default_factory=dict)

    def run(self, transfers: Sequence[Transfer]) -> None:
        """Until all have ended; fails where nothing can happen any more before."""
        numbers = itertools.count()
        events: list[tuple[float, int, Transfer | Flow]] = [(t.at, next(numbers), t) for t in transfers]
        heapq.heapify(events)
        while events or self.left:
            at = events[0][0] if events else inf
            alone = self.scheduler.next_at(self.now)
            self.now = min(at, inf if alone is None else max(alone, self.now))
            assert self.now < inf, "somebody waits, and nothing will ever happen"
            while events and events[0][0] <= self.now:
                self._happen(heapq.heappop(events)[2])
            for flow in self._advance():
                heapq.heappush(events, (self._passes_at(flow), next(numbers), flow))

    def _happen(self, what: Transfer | Flow) -> None:
        if isinstance(what, Transfer):
            flow = self.scheduler.enter(what.link, what.standing, self.now)
            self.left[flow] = list(what.sizes)
        elif self.left[what]:
            self._ask(what)
        else:
            del self.left[what]
            self.scheduler.leave(what, self.now)

    def _ask(self, flow: Flow) -> None:
        self.scheduler.ask(flow, self.left[flow].pop(0), self.now)
        self.asked_at[flow] = self.now

    def _advance(self) -> list[Flow]:
        granted: list[Flow] = []
        while changed := self.scheduler.advance(self.now):
            for flow in changed:
                if flow.burst:
                    self._note(flow)
                    granted.append(flow)
                else:
                    self._ask(flow)
        rules = self.scheduler.rules
        for link in {flow.link for flow in self.left}:
            assert sum(bool(flow.burst) for flow in self.left if flow.link == link) <= rules.width
            for traffic in TrafficClass:
                seated = [f for f in self.left if f.link == link and f.seated and f.traffic is traffic]
                assert len(seated) <= rules.seats[traffic]
        return granted

    def _note(self, flow: Flow) -> None:
        others = [
            (other.link, other.rank, other.priority, other.number, bool(other.asked))
            for other in self.left
            if other is not flow and other.has_something
        ]
        self.grants.append(Grant(self.now, self.asked_at[flow], flow, flow.burst, others))

    def _passes_at(self, flow: Flow) -> float:
        at = self.free_at[flow.link] = max(self.now, self.free_at.get(flow.link, 0.0)) + flow.burst / RATE
        return at


def standings() -> st.SearchStrategy[Standing]:
    return st.builds(Standing, st.sampled_from(list(TrafficClass)), st.integers(-1, 1))


def loads() -> st.SearchStrategy[list[Transfer]]:
    sizes = st.lists(st.integers(1, BURST), min_size=1, max_size=6).map(tuple)
    times = st.floats(0, 0.2, allow_nan=False)
    return st.lists(st.builds(Transfer, times, st.sampled_from("ab"), standings(), sizes), min_size=1, max_size=14)


@settings(max_examples=25, deadline=None)
@given(loads(), st.sampled_from([1, 2]), st.sampled_from([None, 20_000.0]))
def test_everybody_comes_to_an_end(load: list[Transfer], width: int, cap: float | None) -> None:
    rules = Rules(burst_bytes=BURST, width=width, promote_s=0.05, patience_s=0.02, background_bytes_per_s=cap)
    world = World(Scheduler(rules))
    world.run(load)
    assert sum(grant.size for grant in world.grants) == sum(sum(transfer.sizes) for transfer in load)
    assert len(world.scheduler) == 0


@settings(max_examples=25, deadline=None)
@given(loads(), st.sampled_from([1, 2]))
def test_without_shares_and_age_nobody_sends_before_what_is_more_urgent(load: list[Transfer], width: int) -> None:
    world = World(Scheduler(Rules(burst_bytes=BURST, width=width, shares=NOBODY_OWED, promote_s=inf, patience_s=inf)))
    world.run(load)
    for grant in world.grants:
        flow = grant.flow
        for link, rank, priority, number, waits in grant.others:
            if link == flow.link or not waits:  # at another peer only who is sending comes first
                assert (rank, priority) >= (flow.rank, flow.priority)
            if link == flow.link and waits:
                assert (rank, priority, number) > (flow.rank, flow.priority, flow.number)


@settings(max_examples=25, deadline=None)
@given(loads(), st.sampled_from([1, 2]))
def test_everybody_has_a_turn_once_overdue(load: list[Transfer], width: int) -> None:
    """Nobody waits longer than until overdue, and then for those that were overdue before."""
    promote_s = 0.05
    world = World(Scheduler(Rules(burst_bytes=BURST, width=width, shares=NOBODY_OWED, promote_s=promote_s)))
    world.run(load)
    most_seats = sum(world.scheduler.rules.seats.values())
    for grant in world.grants:
        waited_s = grant.at - grant.asked_at
        assert waited_s <= promote_s * (grant.flow.rank + 1) + (most_seats + width) * BURST / RATE + 1e-9


@settings(max_examples=25, deadline=None)
@given(loads(), st.lists(st.integers(1, 8 * BURST), min_size=5, max_size=30), st.sampled_from([3_000.0, 30_000.0]))
@example([], [BURST] * 20, 30_000.0)
def test_background_stays_below_its_cap(load: list[Transfer], sizes: list[int], cap: float) -> None:
    """In every span of time, beyond what may come at once."""
    background = Transfer(0.0, "a", Standing(BACKGROUND), tuple(sizes))
    world = World(Scheduler(Rules(burst_bytes=BURST, promote_s=0.05, background_bytes_per_s=cap)))
    world.run([*load, background])
    for link in "ab":
        mine = [g for g in world.grants if g.flow.traffic is BACKGROUND and g.flow.link == link]
        at_once = max([BURST, *(grant.size for grant in mine)])
        for first, _ in enumerate(mine):
            moved = 0
            for grant in mine[first:]:
                moved += grant.size
                assert moved <= cap * (grant.at - mine[first].at) + at_once + 2.0 * len(mine)


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([HANDOFF, RECOVERY, BACKGROUND]),
    st.lists(st.integers(BURST // 8, BURST), min_size=1, max_size=8),
    st.integers(BURST // 4, BURST),
    st.integers(1, 2),
)
def test_each_class_has_its_share_of_a_full_link(low: TrafficClass, sizes: list[int], mine: int, streams: int) -> None:
    """While a class waits, those above it do not take all, whatever their sizes."""
    rules = Rules(burst_bytes=BURST, width=1, promote_s=inf)
    above = [t for t in TrafficClass if RANKS[t] < RANKS[low]]
    load = [Transfer(0.0, "a", Standing(above[k % len(above)], priority=k), tuple(sizes) * 40) for k in range(streams)]
    world = World(Scheduler(rules))
    enough = streams * 40 * sum(sizes) // mine
    world.run([*load, Transfer(0.0, "a", Standing(low), (mine,) * enough)])
    higher_end = max(i for i, grant in enumerate(world.grants) if grant.flow.traffic is not low)
    until = world.grants[: higher_end + 1]
    own = sum(grant.size for grant in until if grant.flow.traffic is low)
    assert own >= rules.shares[low] * sum(grant.size for grant in until) - 4 * BURST
    assert own <= rules.shares[low] * sum(grant.size for grant in until) + 4 * BURST, "more than its share"


def test_an_urgent_transfer_waits_for_one_burst() -> None:
    scheduler = Scheduler(Rules(burst_bytes=BURST, width=1))
    slow, fast = (scheduler.enter("a", Standing(traffic), 0.0) for traffic in (BACKGROUND, LAST))
    scheduler.advance(0.0)
    scheduler.ask(slow, BURST, 0.0)
    assert scheduler.advance(0.0) == [slow]
    scheduler.ask(fast, BURST, 0.1)
    assert scheduler.advance(0.1) == []
    scheduler.ask(slow, BURST, 0.2)
    assert scheduler.advance(0.2) == [fast]
    scheduler.leave(fast, 0.3)
    assert scheduler.advance(0.3) == [slow]


def test_whoever_is_overdue_goes_before_all_others_and_then_waits_again() -> None:
    scheduler = Scheduler(Rules(width=1, shares=NOBODY_OWED, promote_s=1.0))
    high, low = (scheduler.enter("a", Standing(traffic), 0.0) for traffic in (LAST, BACKGROUND))
    scheduler.advance(0.0)
    sent = []
    for tick in range(20):
        now = tick / 2
        for flow in (high, low):
            if not flow.asked:
                scheduler.ask(flow, BURST, now)
        sent += [(now, flow.traffic) for flow in scheduler.advance(now)]
    assert len(sent) == 20
    assert [at for at, traffic in sent if traffic is BACKGROUND] == [4.0, 8.5]


def test_who_stands_still_holds_back_nobody_at_other_peers() -> None:
    scheduler = Scheduler(Rules(patience_s=0.25))
    stuck, other = scheduler.enter("a", Standing(LAST), 0.0), scheduler.enter("b", Standing(HANDOFF), 0.0)
    scheduler.advance(0.0)
    scheduler.ask(stuck, 10, 0.0)
    scheduler.ask(other, 10, 0.0)
    assert scheduler.advance(0.0) == [stuck]
    assert scheduler.next_at(0.0) == 0.25
    assert scheduler.advance(0.25) == [other]


def test_who_rests_holds_back_nobody() -> None:
    scheduler = Scheduler(Rules())
    urgent, other = scheduler.enter("a", Standing(LAST), 0.0), scheduler.enter("a", Standing(HANDOFF), 0.0)
    scheduler.advance(0.0)
    scheduler.ask(urgent, 10, 0.0)
    scheduler.ask(other, 10, 0.0)
    assert scheduler.advance(0.0) == [urgent]
    scheduler.rest(urgent)
    assert scheduler.advance(0.0) == [other]


def test_who_is_waited_for_by_a_higher_class_is_of_it() -> None:
    scheduler = Scheduler(Rules(width=1))
    first, second = (scheduler.enter(link, Standing(HANDOFF), 0.0) for link in "ab")
    scheduler.advance(0.0)
    scheduler.raise_to(second, LAST)
    scheduler.raise_to(second, BACKGROUND)
    scheduler.ask(second, 10, 0.0)
    scheduler.ask(first, 10, 0.0)
    assert scheduler.advance(0.0) == [second]


def test_with_classes_off_all_are_alike() -> None:
    scheduler = Scheduler(Rules(width=1, classes=False, background_bytes_per_s=1.0))
    first, second = (scheduler.enter("a", Standing(traffic), 0.0) for traffic in (BACKGROUND, LAST))
    scheduler.advance(0.0)
    scheduler.ask(second, BURST, 0.0)
    scheduler.ask(first, BURST, 0.0)
    assert scheduler.advance(0.0) == [first]
    scheduler.leave(first, 0.0)
    assert scheduler.advance(0.0) == [second]
