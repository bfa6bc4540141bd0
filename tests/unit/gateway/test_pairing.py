"""Workers that keep weights or state in different formats side by side, as while a cluster changes over: nobody is
paired with one that would refuse."""

from typing import Any

from services.gateway.router import DefaultPolicy, Demand, Fleet, Route
from services.gateway.workers import Worker
from shared.protocol.reports import Geometry, Pages, WorkerReport

REMOTE = Demand(prompt_len=160, num_choices=1, path="remote", strict=False)
LOCAL = Demand(prompt_len=160, num_choices=1, path="local", strict=False)


def worker(role: str, name: str, identity: str, free: int = 100) -> Worker:
    values: dict[str, Any] = {"role": role, "id": name, "boot_id": "b0", "pid": 1, "host": "h", "state": "ready"}
    pages, slots = Pages(total=100, free=free), Pages(total=8, free=8)
    geometry = Geometry(page_tokens=16, components=("kv",), unit_bytes=(1024,))
    more = {"identity": identity, "geometry": geometry, "pages": pages, "slots": slots, "sequence": 1}
    return Worker(WorkerReport(**(values | more)), 0.0)


def names(route: Route | None) -> tuple[str, ...] | None:
    return None if route is None else tuple(w.report.id for w in route.workers)


P_OLD, P_NEW = worker("prefill", "p-old", "m:float16:kv-float32", 50), worker("prefill", "p-new", "m:int8:kv-fp8")
D_OLD = worker("decode", "d-old", "m:float16:kv-float32", 50)
D_ODD = worker("decode", "d-odd", "m:float16:kv-float16")
D_NEW = worker("decode", "d-new", "m:int8:kv-fp8", 40)


def test_a_decode_worker_that_no_prefill_worker_fits_is_passed_over_though_it_is_the_emptiest() -> None:
    policy, fleet = DefaultPolicy(), Fleet([P_OLD], [D_OLD, D_ODD])
    assert names(policy.choose(REMOTE, fleet)) == names(policy.aim(REMOTE, fleet)) == ("d-old", "p-old")
    assert names(policy.choose(LOCAL, fleet)) == ("d-odd",)


def test_each_decode_worker_gets_the_prefill_worker_of_its_formats() -> None:
    policy = DefaultPolicy()
    both = Fleet([P_OLD, P_NEW], [D_ODD, D_OLD, D_NEW])
    assert names(policy.choose(REMOTE, both)) == ("d-old", "p-old")
    without_old = Fleet([P_OLD, P_NEW], [D_ODD, D_OLD, D_NEW], frozenset({D_OLD.peer}))
    assert names(policy.choose(REMOTE, without_old)) == ("d-new", "p-new")


def test_the_one_that_fits_is_waited_for() -> None:
    fleet = Fleet([P_OLD], [D_OLD, D_ODD], frozenset({D_OLD.peer}))
    assert DefaultPolicy().choose(REMOTE, fleet) is None
