"""With a store: a decode worker is killed, or told to end, in the middle of its streams, and what it had of them comes
out of the store. Each stream gets what it got when nobody disturbed it, whatever its sampling."""

import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.e2e.test_recovery import BASE, SAMPLINGS, differs, run, run_and_kill
from tests.support_answers import Seen
from tests.support_client import poll
from tests.support_cluster import RealCluster
from tests.support_visitor import Visitor, held, prompt_of, report_of, tickets

BLOCK = 64


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    directory, settings = tmp_path_factory.mktemp("store"), {"common.kv_bytes": "256MiB"}
    with RealCluster(directory, decode=2, settings=settings, store=True) as running:
        running.expect_trouble = True
        yield running


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    """Prompts of 80 to 341 tokens: each has a block at least."""
    return [BASE | {"prompt": prompt_of(80 + 29 * k, k)} | sampling for k, sampling in enumerate(SAMPLINGS)]


@pytest.fixture(scope="module")
def quiet(cluster: RealCluster, bodies: list[dict[str, Any]]) -> list[Seen]:
    return run(cluster, bodies)


def losses_of(seen: list[Seen]) -> list[dict[str, Any]]:
    return [loss for one in seen if one.baton is not None for loss in one.baton["timings"]["recovery"]]


@pytest.mark.timeout(600)
def test_the_state_of_a_killed_worker_comes_out_of_the_store(
    cluster: RealCluster, bodies: list[dict[str, Any]], quiet: list[Seen]
) -> None:
    seen, victim, pid = run_and_kill(cluster, bodies, at_tokens=200)
    excused = sum(differs(*triple) for triple in zip(bodies, quiet, seen, strict=True))
    losses = losses_of(seen)
    assert len(losses) >= 2, losses
    assert excused <= 2
    for loss in losses:
        assert loss["path"] == "store", loss
        assert loss["loaded_tokens"] % BLOCK == 0 < loss["loaded_tokens"], loss
        assert loss["loaded_bytes"] > 0, loss
        assert loss["recomputed_tokens"] <= 2 * BLOCK, loss  # a block, and what was on its way to the store
    cluster.wait_ready(victim, other_than=pid)


@pytest.mark.timeout(600)
def test_streams_leave_a_worker_that_is_told_to_end(
    cluster: RealCluster, bodies: list[dict[str, Any]], quiet: list[Seen]
) -> None:
    """Twenty streams over two workers: nobody fails, and nobody's answer changes."""
    twice = [*bodies, *bodies]
    with ExitStack() as stack:
        visitors = [stack.enter_context(Visitor(cluster, **body)) for body in twice]

        def busy() -> str | None:
            return next((w for w in ("decode-0", "decode-1") if tickets(cluster, w, "started") >= 4), None)

        victim: str = poll(busy, "nobody serves several", 60.0)
        pid = report_of(cluster, victim)["pid"]
        cluster.signal(victim, signal.SIGTERM)
        seen = [visitor.stay(240.0) for visitor in visitors]
    excused = sum(differs(*triple) for triple in zip(twice, [*quiet, *quiet], seen, strict=True))
    losses = losses_of(seen)
    gaps = sorted(loss["resumed_s"] - loss["detected_s"] for loss in losses)
    print(f"{len(gaps)} moved, in {gaps[:1]} to {gaps[-1:]} s, {excused} with a near tie")
    assert [loss for loss in losses if loss["cause"] == "draining"], losses
    assert excused <= 4
    cluster.wait_ready(victim, other_than=pid)


@pytest.mark.timeout(600)
def test_the_store_is_killed_and_nobody_notices(
    cluster: RealCluster, bodies: list[dict[str, Any]], quiet: list[Seen]
) -> None:
    """While it is gone a lost stream is computed anew, and after its return nothing half-written is served."""
    with ExitStack() as stack:
        visitors = [stack.enter_context(Visitor(cluster, **body)) for body in bodies]
        poll(lambda: sum(visitor.num_tokens for visitor in visitors) > 60, "nobody streams", 120.0)
        pid = cluster.kill("kvstore")
        seen = [visitor.stay(240.0) for visitor in visitors]
    assert sum(differs(*triple) for triple in zip(bodies, quiet, seen, strict=True)) <= 2
    cluster.wait_ready("kvstore", other_than=pid)
    again, victim, pid = run_and_kill(cluster, bodies, at_tokens=200)
    assert sum(differs(*triple) for triple in zip(bodies, quiet, again, strict=True)) <= 2
    cluster.wait_ready(victim, other_than=pid)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_interrupted_streams(cluster: RealCluster, bodies: list[dict[str, Any]], quiet: list[Seen]) -> None:
    """Workers are killed at random tokens until a hundred streams have lost theirs; 95 come out of the store."""
    rng = random.Random(7)
    losses: list[dict[str, Any]] = []
    num_kills = excused = 0
    while len(losses) < 100:
        seen, victim, pid = run_and_kill(cluster, bodies, at_tokens=rng.randrange(20, 700))
        excused += sum(differs(*triple) for triple in zip(bodies, quiet, seen, strict=True))
        num_kills += 1
        losses += losses_of(seen)
        cluster.wait_ready(victim, other_than=pid)
    gaps = sorted(loss["resumed_s"] - loss["detected_s"] for loss in losses)
    stored = [loss for loss in losses if loss["path"] == "store" and loss["loaded_bytes"]]
    far = [loss for loss in stored if loss["recomputed_tokens"] > 2 * BLOCK]
    print(
        f"{num_kills} kills, {len(losses)} interrupted streams, {len(stored)} from the store, {excused} near ties, "
        f"to the next token p50 {gaps[len(gaps) // 2]:.3f} s, p99 {gaps[len(gaps) * 99 // 100]:.3f} s"
    )
    assert len(stored) >= 0.95 * len(losses), losses
    assert not far, far
    assert excused <= 0.05 * num_kills * len(bodies)


def test_nothing_is_held_for_anybody_afterwards(cluster: RealCluster) -> None:
    deadline = time.monotonic() + 40.0
    while any(number for what, number in held(cluster).items() if not what.startswith("kvstore")):
        assert time.monotonic() < deadline, held(cluster)
        time.sleep(0.2)
    leases = report_of(cluster, "kvstore")["queues"]
    assert (leases["puts"], leases["loads"]) == (0, 0)
