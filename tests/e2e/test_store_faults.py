"""Stores that are full or die: streams go on and are right, and those of a killed decode worker are taken up all the
same, out of the other copy or by a prefill worker."""

import resource
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_recovery import BASE, SAMPLINGS, differs, run, run_and_kill
from tests.e2e.test_store_recovery import losses_of
from tests.support_answers import Seen
from tests.support_client import poll
from tests.support_cluster import RealCluster
from tests.support_visitor import Visitor, prompt_of, report_of, tickets

SETTINGS = {"common.kv_bytes": "256MiB"}
DECODES, STORES = ("decode-0", "decode-1"), ("kvstore-0", "kvstore-1")
LARGEST_FILE_BYTES = 100_000
"""Far less than a block has."""


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    """Prompts of two to four blocks, every other sampling there is, and one with two choices. Nothing of a new
    prompt comes out of the stores: only what is lost later does."""
    base, samplings = BASE | {"baton": {"timings": True, "path": "remote"}}, [*SAMPLINGS[::2], SAMPLINGS[7]]
    return [base | {"prompt": prompt_of(140 + 29 * k, k)} | sampling for k, sampling in enumerate(samplings)]


def started(directory: Path, settings: Mapping[str, object], **more: Any) -> RealCluster:
    cluster = RealCluster(directory, decode=2, settings=SETTINGS | dict(settings), store=True, **more)
    cluster.expect_trouble = True
    return cluster


def check_same(bodies: list[dict[str, Any]], quiet: list[Seen], seen: list[Seen]) -> None:
    """Each is complete and what it was in quiet; two may have parted at a near tie."""
    assert sum(differs(*triple) for triple in zip(bodies, quiet, seen, strict=True)) <= 2


@pytest.mark.timeout(900)
def test_a_disk_that_is_full(tmp_path: Path, bodies: list[dict[str, Any]]) -> None:
    """It takes no block, and the memory above has room for one: what gives way there is gone, and a prefill worker
    computes it."""
    with started(tmp_path, {"kvstore.memory_mib": 4}) as cluster:
        run(cluster, bodies[-1:])
        written = lambda: report_of(cluster, "kvstore")["counters"].get("blocks_written")  # noqa: E731
        poll(written, "nothing is on the disk", 60.0)
        limits = (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES)
        resource.prlimit(report_of(cluster, "kvstore")["pid"], resource.RLIMIT_FSIZE, limits)
        quiet = run(cluster, bodies)
        seen, victim, pid = run_and_kill(cluster, bodies, at_tokens=100)
        check_same(bodies, quiet, seen)
        losses = losses_of(seen)
        assert len(losses) >= 2, losses
        assert "remote" in {loss["path"] for loss in losses}, losses
        cluster.wait_ready(victim, other_than=pid)
        poll(lambda: cluster.counter("kvstore", "writes_refused"), "no write was refused", 60.0)
        assert cluster.counter("kvstore", "blocks_evicted") > 0
        assert cluster.counter("kvstore", "sidecar_restarts") == 0


@pytest.mark.timeout(900)
def test_a_store_that_takes_nothing(tmp_path: Path, bodies: list[dict[str, Any]]) -> None:
    """The quota is less than a block: every put is refused and counted."""
    with started(tmp_path, {"kvstore.tenant_bytes": "1MiB"}) as cluster:
        quiet = run(cluster, bodies)
        seen, victim, pid = run_and_kill(cluster, bodies, at_tokens=100)
        check_same(bodies, quiet, seen)
        losses = losses_of(seen)
        assert len(losses) >= 2, losses
        assert {loss["path"] for loss in losses} == {"remote"}, losses
        cluster.wait_ready(victim, other_than=pid)
        poll(lambda: cluster.counter("kvstore", "quota_refused"), "nothing was refused", 60.0)
        assert [cluster.counter("kvstore", name) for name in ("blocks_stored", "blocks_known")] == [0, 0]
        assert cluster.counter("decode", "blocks_put") == cluster.counter("prefill", "blocks_put") == 0


@pytest.mark.timeout(900)
def test_one_of_two_stores_dies_and_then_a_decode_worker(tmp_path: Path, bodies: list[dict[str, Any]]) -> None:
    """Each block is in both stores: what the one took with it comes out of the other."""
    with started(tmp_path, {"common.store_copies": 2}, kvstores=2) as cluster:
        quiet = run(cluster, bodies)

        def have_the_same() -> bool:
            known = {report_of(cluster, store)["counters"].get("blocks_known") for store in STORES}
            return len(known) == 1 and known != {None}

        poll(have_the_same, lambda: f"not in both: {cluster.workers('kvstore')}", 60.0)
        for store in STORES:
            with ExitStack() as stack:
                visitors = [stack.enter_context(Visitor(cluster, **body)) for body in bodies]

                def busy(visitors: list[Visitor] = visitors) -> str | None:
                    if sum(visitor.num_tokens for visitor in visitors) < 150:
                        return None
                    return next((name for name in DECODES if tickets(cluster, name, "started") >= 2), None)

                victim: str = poll(busy, "nobody streams to several", 180.0)
                store_pid = cluster.kill(store)
                pid = cluster.kill(victim)
                seen = [visitor.stay(300.0) for visitor in visitors]
            check_same(bodies, quiet, seen)
            losses = losses_of(seen)
            print(f"{store} killed: {[loss['path'] for loss in losses]}")
            assert len(losses) >= 2, losses
            assert "store" in {loss["path"] for loss in losses}, losses
            cluster.wait_ready(store, other_than=store_pid, within_s=120.0)
            cluster.wait_ready(victim, other_than=pid, within_s=120.0)
        assert cluster.counter("gateway", "recoveries_given_up") == 0
