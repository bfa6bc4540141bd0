"""What Baton's own reports say of a run, from reports made by hand."""

from typing import Any

import pytest

from services.bench.figures.cluster import ClusterHistory, Spread, read_cluster, read_cpu_s


def worker(role: str, at: str, age_s: float = 0.0, boot_id: str = "a", free: int = 100, **more: Any) -> dict[str, Any]:
    pages = {"total": 100, "free": free} if role in ("prefill", "decode") else None
    said = {"role": role, "id": at, "boot_id": boot_id, "age_s": age_s, "pages": pages}
    return said | {"queues": more.pop("queues", {}), "counters": more}


def history(*bodies: tuple[float, list[dict[str, Any]]]) -> ClusterHistory:
    return ClusterHistory([read_cluster({"workers": workers}, now_s) for now_s, workers in bodies])


def test_a_pool() -> None:
    found = history(
        (1.0, [worker("decode", "d0", busy_seconds=5.0, queues={"running": 2, "waiting": 0}), worker("decode", "d1")]),
        (
            5.0,
            [
                worker("decode", "d0", busy_seconds=7.0, free=40, tokens_generated=30.0, queues={"running": 4}),
                worker("decode", "d1", busy_seconds=1.0, age_s=1.0, free=80, queues={"running": 2}),
            ],
        ),
    ).figures()
    assert found is not None
    assert set(found.pools) == {"decode"}
    pool = found.pools["decode"]
    assert (pool.workers, pool.tokens_generated) == (2, 30.0)
    assert pool.busy_share == (2.0 + 1.0) / (4.0 + 3.0)  # the second one spoke a second before
    assert pool.queues == {"running": Spread(4.0, 6.0)}
    assert pool.kv_use is not None
    assert (pool.kv_use.mean, pool.kv_use.max) == (pytest.approx(0.2), pytest.approx(0.4))


def test_what_is_said_after_the_end_moves_counters_and_no_queues() -> None:
    seen = history((0.0, [worker("decode", "d0", busy_seconds=1.0, free=50, queues={"running": 4})]))
    seen.last = read_cluster({"workers": [worker("decode", "d0", busy_seconds=3.0, tokens_generated=8.0)]}, 4.0)
    found = seen.figures()
    assert found is not None
    pool = found.pools["decode"]
    assert (found.samples, pool.busy_share, pool.tokens_generated) == (1, 0.5, 8.0)
    assert (pool.queues, pool.kv_use) == ({"running": Spread(4.0, 4.0)}, Spread(0.5, 0.5))


def test_a_worker_that_started_again_begins_anew() -> None:
    found = history(
        (0.0, [worker("prefill", "p0", busy_seconds=50.0)]),
        (2.0, [worker("prefill", "p0", busy_seconds=51.0)]),
        (4.0, [worker("prefill", "p0", boot_id="b", busy_seconds=0.0)]),
        (6.0, [worker("prefill", "p0", boot_id="b", busy_seconds=2.0)]),
    ).figures()
    assert found is not None
    assert found.pools["prefill"].busy_share == 3.0 / 4.0
    assert found.pools["prefill"].workers == 1


def test_bytes_by_backend_and_the_gateway() -> None:
    seen = history(
        (0.0, [worker("sidecar", "s0", sent_shm_bytes=100.0), worker("gateway", "g", queues={"waiting": 1})]),
        (1.0, [worker("sidecar", "s0", sent_shm_bytes=150.0, received_shm_bytes=9.0), worker("gateway", "g")]),
        (2.0, [worker("sidecar", "s0", sent_shm_bytes=400.0, sent_tcp_bytes=8.0), worker("gateway", "g")]),
    )
    seen.gateway_cpu_s = [(1.0, 10.0), (5.0, 11.0)]
    found = seen.figures()
    assert found is not None
    assert found.moved_bytes == {"shm": 300.0, "tcp": 8.0}
    assert found.gateway_queues == {"waiting": Spread(pytest.approx(1 / 3), 1.0)}
    assert (found.pools, found.gateway_cpu_share, found.samples) == ({}, 0.25, 3)


@pytest.mark.parametrize("body", [None, [], {}, {"workers": None}, {"workers": [3]}])
def test_what_is_no_report(body: Any) -> None:
    assert read_cluster(body, 0.0) == []
    assert ClusterHistory([]).figures() is None


@pytest.mark.parametrize("nonsense", [7, "many", [1], {"a": None}, {"a": "b"}, {"a": [2]}, None])
def test_fields_that_are_no_numbers_are_left_out(nonsense: Any) -> None:
    said = worker("decode", "d0", tokens_generated=3.0) | {"age_s": "long ago", "queues": nonsense, "pages": nonsense}
    (found,) = read_cluster({"workers": [said]}, 2.0)
    assert (found.at_s, found.queues, found.pages_total) == (2.0, {}, 0.0)
    assert found.counters == {"tokens_generated": 3.0}


def test_cpu_seconds_of_a_process() -> None:
    assert read_cpu_s("# HELP x\nprocess_cpu_seconds_total 1.27\nother 3\n") == 1.27
    assert read_cpu_s("other 3\n") is None
