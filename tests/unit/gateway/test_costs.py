"""Which way an interrupted answer's state is thought to come back sooner, and who may leave a worker that is to end."""

import pytest

from services.gateway.admission import RoomQueue
from services.gateway.attempt import Attempt, orders_of
from services.gateway.costs import LOAD_HALF_LIFE_S, Rates
from services.gateway.generation import GenerationRequest
from services.gateway.history import History
from services.gateway.inbox import Inbox
from services.gateway.moving import Moves
from services.gateway.recovery import Recoveries
from services.gateway.router import DefaultPolicy, Demand, Fleet, Route
from services.gateway.workers import Worker, WorkerRegistry
from shared.machines import request as machine
from shared.protocol.messages import Reserve, SamplingSpec, TicketTimings, TokenEntry, Tokens
from shared.protocol.reports import Pages
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters
from shared.runtime.errors import PeerLost
from tests.unit.gateway.reports import registry, report


@pytest.mark.parametrize(("trunk_len", "stored", "from_store"), [(2000, 1984, True), (2000, 0, False), (20, 16, False)])
def test_the_sooner_way_is_taken(trunk_len: int, stored: int, from_store: bool) -> None:
    """A load has fixed costs: what is computed in less time is computed."""
    assert Rates().estimate(trunk_len, stored).from_store is from_store


def test_rates_are_learned_from_what_tickets_say() -> None:
    rates = Rates()
    for _ in range(40):
        rates.note(TicketTimings(prefill_s=1.0, loaded_tokens=1024, cached_tokens=1024, load_s=2.02), 1024 + 500)
    assert rates.compute_s == pytest.approx(1 / 500, rel=0.01)
    assert rates.load_s == pytest.approx(2 / 1024, rel=0.01)
    estimate = rates.estimate(2048, 1024)
    assert estimate.store_s == pytest.approx(2.02 + 2.048, rel=0.01)
    assert estimate.prefill_s == pytest.approx(4.096, rel=0.01)
    assert estimate.from_store
    for _ in range(40):  # the stores have become slow
        rates.note(TicketTimings(loaded_tokens=1024, cached_tokens=1024, load_s=5.02), 1024)
    assert not rates.estimate(2048, 1024).from_store


def test_a_slow_store_is_tried_again_after_a_while() -> None:
    """Nothing but time can show that it has become fast: it is not used meanwhile."""
    clock = SetClock()
    rates = Rates(clock=clock)
    slow = TicketTimings(loaded_tokens=1024, load_s=9.02)
    for _ in range(40):
        rates.note(slow, 1024)
    assert not rates.estimate(2048, 2000).from_store
    learned, guess = rates.load_now_s, Rates().load_s
    clock.at += LOAD_HALF_LIFE_S
    assert rates.load_now_s - guess == pytest.approx((learned - guess) / 2)
    clock.at += 9 * LOAD_HALF_LIFE_S
    assert rates.estimate(2048, 2000).from_store
    before = rates.load_now_s
    rates.note(slow, 1024)
    assert rates.load_now_s == pytest.approx(before + 0.3 * (9 / 1024 - before)), "what had faded does not come back"


def test_short_prompts_teach_nothing() -> None:
    rates = Rates()
    rates.note(TicketTimings(prefill_s=9.0, loaded_tokens=10, load_s=9.0), 30)
    assert rates == Rates()


def test_the_last_position_is_computed_whatever_is_stored() -> None:
    rates = Rates()
    assert rates.estimate(128, 500) == rates.estimate(128, 127)


def test_the_store_is_asked_for_half_of_what_it_is_thought_to_have_at_least() -> None:
    told = History.empty(1)
    told.stored = 640
    decode, prefill = (Worker(report(role, role[0]), 0.0) for role in ("decode", "prefill"))
    attempt = Attempt(machine.Attempt(5, 2), Inbox(Counters()).open(5, 2, told), told, 0.0, 3)
    request = GenerationRequest("req", (1, 2, 3), SamplingSpec(), tenant="t", cache_salt="s")
    (reserve,) = (order.message for order in orders_of(request, attempt, Route(decode, None, True), "gw", 9.0, 0.0))
    assert isinstance(reserve, Reserve)
    assert (reserve.load, reserve.load_least, reserve.salt) == (True, 320, "t/s")
    both = [order.message for order in orders_of(request, attempt, Route(decode, prefill), "gw", 9.0, 0.0)]
    assert [(getattr(one, "load", False), one.salt) for one in both] == [(False, "t/s")] * 2  # type: ignore[attr-defined]


def test_what_is_to_be_loaded_goes_to_a_decode_worker_alone() -> None:
    decode, prefill = Worker(report("decode", "d0"), 0.0), Worker(report("prefill", "p0"), 0.0)
    asked = Demand(prompt_len=160, num_choices=1, path="remote", strict=False, identity="same", load=True)
    route = DefaultPolicy().choose(asked, Fleet([prefill], [decode]))
    assert route == Route(decode, None, True)
    assert route.path == "store"


async def test_how_far_the_stores_have_it_only_rises() -> None:
    inbox = Inbox(Counters())
    box = inbox.open(5, 1, History.empty(1))
    for position in (64, 192, 128):
        await inbox.on_tokens(Tokens(sender="d-1", entries=(), stored=((5, position), (6, 999))))
    assert box.stored == 192
    assert not box.senders, "that is no sign that somebody has taken over"


class SetClock(LoopClock):
    """Of which the test says what time it is."""

    at = 1000.0

    def now(self) -> float:
        return self.at


def fleet(*decodes: tuple[str, int]) -> WorkerRegistry:
    made = registry()
    for name, free in decodes:
        made.observe(report("decode", name, free))
    return made


def demand(path: str = "auto", *, load: bool = True) -> Demand:
    strict = path != "auto"
    return Demand(prompt_len=160, num_choices=1, path=path, strict=strict, identity="same", load=load)  # type: ignore[arg-type]


def moves(workers: WorkerRegistry, *, is_on: bool = True) -> Moves:
    rooms = RoomQueue(workers, DefaultPolicy(), LoopClock(), max_queued=8, queue_timeout_s=1.0)
    return Moves(rooms, is_on=is_on)


@pytest.mark.parametrize(("others", "may"), [((), False), ((("d1", 5),), False), ((("d1", 60),), True)])
async def test_a_stream_leaves_only_for_a_worker_with_room(others: tuple[tuple[str, int], ...], may: bool) -> None:
    workers, leaving = fleet(("d0", 60), *others), report("decode", "d0").peer
    assert moves(workers).may_begin(object(), leaving, demand) is may
    assert not moves(workers, is_on=False).may_begin(object(), leaving, demand)


@pytest.mark.parametrize(("prefill_pages", "may"), [(None, False), (5, False), (60, True)])
async def test_where_a_prefill_worker_is_needed_it_must_have_room(prefill_pages: int | None, may: bool) -> None:
    """Also one that could never take it: it would be asked all the same, and say no."""
    workers = fleet(("d0", 60), ("d1", 60))
    if prefill_pages is not None:
        workers.observe(report("prefill", "p0", pages=Pages(total=prefill_pages, free=prefill_pages)))
    remote = lambda: demand("remote", load=False)  # noqa: E731
    assert moves(workers).may_begin(object(), report("decode", "d0").peer, remote) is may


async def test_who_has_just_said_no_serves_nobody_until_it_reports_anew() -> None:
    workers, leaving = fleet(("d0", 60), ("d1", 60)), report("decode", "d0").peer
    rooms = RoomQueue(workers, DefaultPolicy(), LoopClock(), max_queued=8, queue_timeout_s=1.0)
    assert rooms.could_serve(demand(), without=leaving)
    rooms.refused(report("decode", "d1").peer)
    assert not rooms.could_serve(demand(), without=leaving)
    assert rooms.could_serve(demand(), without=report("decode", "d1").peer)
    workers.observe(report("decode", "d1", 60, sequence=2))
    assert rooms.could_serve(demand(), without=leaving)


@pytest.mark.parametrize(("prefill", "may"), [(None, False), ("draining", False), ("ready", True)])
async def test_who_insists_on_a_prefill_worker_stays_where_none_is_left(prefill: str | None, may: bool) -> None:
    workers = fleet(("d0", 60), ("d1", 60))
    if prefill is not None:
        workers.observe(report("prefill", "p0", pages=Pages(total=60, free=60), state=prefill))
    insists = lambda: demand("remote", load=False)  # noqa: E731
    assert moves(workers).may_begin(object(), report("decode", "d0").peer, insists) is may


async def test_a_few_leave_at_a_time() -> None:
    some, leaving = moves(fleet(("d0", 60), ("d1", 60))), report("decode", "d0").peer
    first, *others = [object() for _ in range(6)]
    began = [some.may_begin(who, leaving, demand) for who in (first, *others)]
    assert began == [True] * 4 + [False] * 2
    some.ended(first)
    some.ended(first)
    assert [some.may_begin(who, leaving, demand) for who in (object(), object())] == [True, False]


async def test_those_whose_worker_says_that_it_will_end_are_told() -> None:
    workers, inbox = registry(), Inbox(Counters())
    workers.on_draining = inbox.leave
    here, there, early = (inbox.open(room, 1, History.empty(1)) for room in (1, 2, 3))
    for room, (box, name) in enumerate(((here, "d0"), (there, "d1"), (early, "d0")), 1):
        box.legs = {"decode": report("decode", name).peer, "prefill": "p-1"}
        if box is not early:
            entry = TokenEntry(room=room, generation=1, choice=0, index=0, tokens=(1,))
            await inbox.on_tokens(Tokens(sender=box.legs["decode"], entries=(entry,)))
    workers.observe(report("decode", "d0"))
    assert not here.leaving
    workers.observe(report("decode", "d0", sequence=2, state="draining", pages=Pages(total=9, free=9)))
    assert (here.leaving, there.leaving) == (True, False)
    assert not early.leaving, "its hand-off is still under way, and comes to its end"


async def test_moves_are_recoveries_that_do_not_count_against_the_limit() -> None:
    recoveries = Recoveries(LoopClock(), Counters(), 0.0, most=1)
    for _ in range(3):
        recoveries.begin(PeerLost("about to end"), planned=True)
        recoveries.resumed("store", TicketTimings(loaded_tokens=64, cached_tokens=64, loaded_bytes=105), 80)
    assert not recoveries.exhausted
    assert recoveries.as_list()[0] | {"resumed_s": 0} == {
        "cause": "peer_lost",
        "detected_s": recoveries.as_list()[0]["detected_s"],
        "resumed_s": 0,
        "path": "store",
        "estimated_s": None,
        "loaded_tokens": 64,
        "loaded_bytes": 105,
        "recomputed_tokens": 16,
    }
    recoveries.begin(PeerLost("gone"))
    assert recoveries.exhausted
