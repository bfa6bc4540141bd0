"""Which workers are chosen, from reports alone; and that the gateway's own ledger stands in until a report counts."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.router import DefaultPolicy, Demand, Fleet, Route
from services.gateway.workers import Worker
from shared.protocol.reports import Pages
from shared.runtime.errors import NoWorker
from tests.unit.gateway.reports import AUTO, registry, report


def worker(role: str, name: str, free: int = 100, **more: Any) -> Worker:
    return Worker(report(role, name, free, **more), 0.0)


def choose(
    demand: Demand, prefills: list[Worker], decodes: list[Worker], refused: set[str] | None = None
) -> Route | None:
    return DefaultPolicy().choose(demand, Fleet(prefills, decodes, frozenset(refused or ())))


STRICT = Demand(prompt_len=160, num_choices=1, path="auto", strict=True)
REMOTE = Demand(prompt_len=160, num_choices=1, path="remote", strict=False)
LOCAL = Demand(prompt_len=160, num_choices=1, path="local", strict=False)


def test_the_least_busy_prefill_and_the_emptiest_decode_are_chosen() -> None:
    prefills = [
        worker("prefill", "p0", 90, tickets={"computing": 3}),
        worker("prefill", "p1", 40, tickets={"waiting": 1}),
    ]
    decodes = [worker("decode", "d0", 20), worker("decode", "d1", 60)]
    route = choose(AUTO, prefills, decodes)
    assert route is not None
    assert (route.prefill and route.prefill.report.id, route.decode.report.id, route.path) == ("p1", "d1", "remote")


@pytest.mark.parametrize(("demand", "path"), [(AUTO, "local"), (LOCAL, "local"), (STRICT, None), (REMOTE, None)])
def test_without_a_prefill_worker(demand: Demand, path: str | None) -> None:
    if path is None:
        with pytest.raises(NoWorker):
            choose(demand, [], [worker("decode", "d0")])
    else:
        route = choose(demand, [], [worker("decode", "d0")])
        assert route is not None
        assert route.path == path


def test_where_prompts_are_computed_by_d_the_one_with_fewest_ahead_is_chosen() -> None:
    """Free pages say how much decodes there, which costs a prompt little."""
    roomy = worker("decode", "d0", 90, queues={"prefilling": 1})
    idle = worker("decode", "d1", 40, queues={"running": 9})
    route = choose(LOCAL, [], [roomy, idle])
    assert route is not None
    assert route.decode is idle
    idle.pending |= {1: 1, 2: 1}
    route = choose(AUTO, [], [roomy, idle])
    assert route is not None
    assert route.decode is roomy


def test_of_those_with_as_many_prompts_ahead_the_emptiest_is_chosen_and_one_that_waits_is_ahead_too() -> None:
    full, empty = (worker("decode", name, free, queues={"waiting": 1}) for name, free in (("d0", 40), ("d1", 90)))
    route = choose(LOCAL, [], [full, empty])
    assert route is not None
    assert route.decode is empty
    route = choose(LOCAL, [], [empty, worker("decode", "d2", 40)])
    assert route is not None
    assert route.decode.report.id == "d2"


async def test_a_worker_of_another_mode_is_named() -> None:
    known = registry()
    known.observe(report("decode", "d0", settings={"mode": "colocated"}))
    assert known.of_another_mode("colocated") is None
    known.observe(report("prefill", "p0", settings={"mode": "separated"}))
    assert known.of_another_mode("colocated") == "p0 runs in mode separated, the gateway in mode colocated"


def test_without_a_decode_worker_nothing_can_be_served() -> None:
    with pytest.raises(NoWorker, match="decode"):
        choose(LOCAL, [worker("prefill", "p0")], [])


def test_no_room_means_wait_and_not_another_path() -> None:
    busy = [worker("prefill", "p0", 9)]
    assert choose(AUTO, busy, [worker("decode", "d0")]) is None
    assert choose(AUTO, [worker("prefill", "p0")], [worker("decode", "d0", 10)]) is None
    assert choose(AUTO, [worker("prefill", "p0", 10)], [worker("decode", "d0", 11)]) is not None


def test_what_can_never_fit_is_asked_at_once_so_that_it_holds_nobody_up() -> None:
    """Only the worker itself can say that it never fits, and a busy one can as well as an idle one."""
    busy = [worker("prefill", "p0", 9)], [worker("decode", "d0", 9, slots=Pages(total=8, free=0))]
    assert choose(Demand(prompt_len=100_000, num_choices=1, path="auto", strict=False), *busy) is not None
    assert choose(Demand(prompt_len=16, num_choices=9, path="auto", strict=False), *busy) is not None
    assert choose(Demand(prompt_len=16, num_choices=8, path="auto", strict=False), *busy) is None


def test_a_prompt_goes_to_the_pool_it_fits_even_if_a_smaller_one_is_idle() -> None:
    big = Demand(prompt_len=1000, num_choices=1, path="auto", strict=False)
    small = worker("prefill", "p0", 50, pages=Pages(total=50, free=50))
    large = worker("prefill", "p1", 70, tickets={"computing": 3})
    route = choose(big, [small, large], [worker("decode", "d0")])
    assert route is not None
    assert route.prefill is large


def test_decode_workers_are_asked_by_their_own_arithmetic() -> None:
    """D takes growth_tokens a choice beyond the prompt, and nothing at all while it has preempted requests."""
    tight = worker("decode", "d0", 25, settings={"growth_tokens": 256})
    assert choose(replace(AUTO, max_tokens=1000), [worker("prefill", "p0")], [tight]) is None
    assert choose(replace(AUTO, max_tokens=16), [worker("prefill", "p0")], [tight]) is not None
    stuck = worker("decode", "d0", 90, queues={"preempted": 1})
    assert choose(AUTO, [worker("prefill", "p0")], [stuck]) is None


def test_workers_that_failed_this_request_come_last() -> None:
    decodes = [worker("decode", "d0", 90), worker("decode", "d1", 80)]
    wary = replace(AUTO, avoid=frozenset({decodes[0].peer}))
    route = choose(wary, [worker("prefill", "p0")], decodes)
    assert route is not None
    assert route.decode is decodes[1]
    route = choose(wary, [worker("prefill", "p0")], decodes[:1])
    assert route is not None
    assert route.decode is decodes[0]


def test_a_refusal_counts_until_the_next_report() -> None:
    prefill, decode = worker("prefill", "p0"), worker("decode", "d0")
    assert choose(AUTO, [prefill], [decode], {decode.peer}) is None


def test_workers_of_another_model_are_never_paired() -> None:
    prefill, decode = worker("prefill", "p0", identity="m:int8"), worker("decode", "d0", identity="m:float16")
    with pytest.raises(NoWorker, match=r"holds the model.*prefill holds m:int8, decode holds m:float16"):
        choose(AUTO, [prefill], [decode])


def test_an_answer_that_has_begun_goes_on_with_its_own_model() -> None:
    """Also where D computes it all again: another model would end what this one began."""
    prefills, decodes = [worker("prefill", "p0")], [worker("decode", "d0", 20), worker("decode", "d1", identity="new")]
    for demand in (AUTO, LOCAL, REMOTE):
        route = choose(replace(demand, identity="same"), prefills, decodes)
        assert route is not None
        assert route.decode is decodes[0]
        with pytest.raises(NoWorker, match="no decode worker holds the model"):
            choose(replace(demand, identity="same"), prefills, decodes[1:])
    upgraded = [worker("prefill", "p1", identity="new")]
    route = choose(replace(AUTO, identity="same"), upgraded, decodes)
    assert route is not None
    assert (route.path, route.decode) == ("local", decodes[0])


def test_an_answer_that_outgrows_every_prefill_worker_goes_on_where_it_fits() -> None:
    grown, small = (
        replace(AUTO, prompt_len=1000, identity="same"),
        worker("prefill", "p0", 50, pages=Pages(total=50, free=50)),
    )
    decode = worker("decode", "d0")
    for path in ("auto", "remote", "hybrid"):
        route = choose(replace(grown, path=path), [small], [decode])
        assert route is not None
        assert route.path == "local"
    for strict in (
        replace(grown, strict=True),
        replace(grown, path="remote", strict=True),
        replace(grown, identity=None),
    ):
        route = choose(strict, [small], [decode])
        assert route is not None
        assert route.path == "remote", "only the worker itself can say that it never fits"


def test_who_is_too_small_is_not_asked_while_one_that_is_not_cannot_be() -> None:
    small, large = worker("decode", "d0", 3, pages=Pages(total=3, free=3)), worker("decode", "d1")
    fleet = Fleet([worker("prefill", "p0")], [small, large], frozenset({large.peer}))
    assert DefaultPolicy().choose(AUTO, fleet) is None
    shut = replace(fleet, refused=frozenset(), shut={(large.peer, "decode"): (1, 1.0)})
    assert DefaultPolicy().choose(AUTO, shut) is None
    assert DefaultPolicy().choose(LOCAL, replace(fleet, prefills=[])) is None


async def test_what_was_asked_for_is_charged_until_a_report_counts_it() -> None:
    known = registry()
    known.observe(report("decode", "d0", 50))
    (found,) = known.ready("decode")
    known.charge(found.peer, 7, 20)
    assert found.free_pages == 30
    known.observe(report("decode", "d0", 50, sequence=2))
    assert found.free_pages == 30, "the report was made before the worker's yes"
    known.settle(found.peer, 7, granted=True)
    assert found.free_pages == 30
    known.observe(report("decode", "d0", 30, sequence=3))
    assert found.free_pages == 30
    known.charge(found.peer, 8, 5)
    known.settle(found.peer, 8, granted=False)
    assert found.free_pages == 30


async def test_late_reports_and_earlier_boots_change_nothing() -> None:
    known = registry()
    known.observe(report("decode", "d0", 50, sequence=5))
    known.observe(report("decode", "d0", 99, sequence=4))
    assert known.ready("decode")[0].free_pages == 50
    known.observe(report("decode", "d0", 70, boot="b1"))
    assert [w.peer for w in known.ready("decode")] == ["d0-b1"]
    assert not known.is_alive("d0-b0")
    known.observe(report("decode", "d0", 99, sequence=9))
    assert [w.peer for w in known.ready("decode")] == ["d0-b1"], "a late report of the old boot brings nothing back"


async def test_silence_is_noticed_by_time_alone() -> None:
    known = registry()
    known.observe(report("decode", "d0"))
    await asyncio.sleep(0.08)
    assert known.is_alive("d0-b0")
    known.sweep()
    assert not known.is_alive("d0-b0")
