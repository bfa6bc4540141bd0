"""Processes die, freeze and come back under load. As long as its gateway lives a request ends with the right answer,
since other workers take it up; the cluster is whole again afterwards and holds nothing of what was lost."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support_chaos import (
    CONNECTION_LOST,
    DEADLINE_S,
    LATE_S,
    RIGHT,
    Load,
    Order,
    check_serves,
    wait_whole,
)
from tests.support_client import poll
from tests.support_cluster import RealCluster
from tests.support_processes import Files, launcher_of, open_files
from tests.support_replay import Asked
from tests.support_visitor import pages_held

LEASE_S = 20.0
"""Until nobody holds anything for a frozen peer: it is noticed after two seconds, its own sidecar after ten."""
PROMPTS = [tuple((i * 31 + length) % 40_000 + 100 for i in range(length)) for length in (7, 30, 60, 260)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    settings = {"gateway.request_timeout_s": DEADLINE_S, "common.kv_bytes": "256MiB"}
    with RealCluster(tmp_path_factory.mktemp("loss"), prefill=2, decode=2, settings=settings) as running:
        running.expect_trouble = True
        yield running


@pytest.fixture
def files(cluster: RealCluster) -> Files:
    """What is open before the test."""
    return open_files(cluster)


def load(cluster: RealCluster) -> Load:
    """Twelve requests of all lengths, greedy and sampled, whole and streamed, all at once."""
    temperatures = [0.0] * 6 + [0.8] * 6
    asked = [
        Asked(PROMPTS[number % 4], 48 + number, temperature, seed=number, ignore_eos=True)
        for number, temperature in enumerate(temperatures)
    ]
    return Load(cluster.url, [Order(one, stream=number % 8 < 4) for number, one in enumerate(asked)])


def wait_until_busy(cluster: RealCluster, name: str) -> None:
    """Until the worker, or the one this sidecar belongs to, has work in hand; D itself: three requests that decode."""

    def is_busy() -> bool:
        report = cluster.worker(name.removesuffix("-sidecar"))
        tickets: dict[str, int] = {} if report is None else report["tickets"]
        return tickets.get("started", 0) >= 3 if name in ("decode-0", "decode-1") else any(tickets.values())

    poll(is_busy, f"{name} gets nothing to do", DEADLINE_S)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "prefill-1-sidecar", "decode-1-sidecar"])
def test_killed_and_started_again(cluster: RealCluster, name: str, files: Files) -> None:
    before = cluster.worker(name)
    assert before is not None
    with load(cluster) as running:
        wait_until_busy(cluster, name)
        pid = cluster.kill(name)
    after = wait_whole(cluster, name, other_than=pid)
    assert after is not None
    assert after["boot_id"] != before["boot_id"]
    outcomes = running.check()
    assert outcomes[RIGHT] == len(running.orders), outcomes
    check_serves(cluster, files, PROMPTS[1])


def test_the_gateway_is_killed(cluster: RealCluster, files: Files) -> None:
    """Its clients cannot be told anything; the workers notice that nobody waits for their work."""
    before = cluster.worker("gateway")
    assert before is not None
    with load(cluster) as running:
        running.wait_for_tokens(8)
        pid = cluster.kill("gateway")
    after = wait_whole(cluster, "gateway", other_than=pid)
    assert after is not None
    assert after["boot_id"] != before["boot_id"]
    outcomes = running.check(may_break=True)
    assert outcomes[CONNECTION_LOST] >= 6, outcomes
    check_serves(cluster, files, PROMPTS[1])


@pytest.mark.parametrize("away_s", [2.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_nats_is_killed(cluster: RealCluster, files: Files, away_s: float) -> None:
    """It comes back on its port, and all processes with it; nobody takes a worker for lost meanwhile."""
    boots = {worker["id"]: worker["boot_id"] for worker in cluster.workers()}
    launcher = launcher_of(cluster)
    with load(cluster) as running:
        running.wait_for_tokens(8)
        launcher.suspend()  # so that it starts no other one yet
        try:
            cluster.kill("nats-server")
            time.sleep(away_s)
        finally:
            launcher.resume()
    wait_whole(cluster)
    outcomes = running.check()
    assert outcomes[RIGHT] >= 9, outcomes
    check_serves(cluster, files, PROMPTS[1])
    assert {worker["id"]: worker["boot_id"] for worker in cluster.workers()} == boots


FREEZES = ["decode-1", "prefill-0"] + [
    pytest.param(name, marks=pytest.mark.slow) for name in ("decode-0-sidecar", "prefill-1-sidecar", "gateway")
]


@pytest.mark.parametrize("name", FREEZES)
def test_nobody_holds_anything_for_a_frozen_peer(cluster: RealCluster, name: str, files: Files) -> None:
    """What waits for it goes elsewhere or ends, and while it still is frozen all others are free of it. Woken, it lets
    go of all that was taken from it, and nothing it says late is heard; a sidecar was replaced meanwhile."""
    ports = {worker["id"]: worker["http_port"] for worker in cluster.workers() if worker["pages"] is not None}
    boots = {worker["id"]: worker["boot_id"] for worker in cluster.workers() if worker["role"] != "sidecar"}
    with load(cluster) as running:
        running.wait_for_tokens(4) if name == "gateway" else wait_until_busy(cluster, name)
        pid = cluster.signal(name, signal.SIGSTOP)
        try:
            if name != "gateway":
                poll(lambda: running.ended, lambda: f"hang: {running.orders}", DEADLINE_S + LATE_S)
            others = [port for worker, port in ports.items() if worker != name.removesuffix("-sidecar")]
            poll(lambda: not any(map(pages_held, others)), lambda: f"{list(map(pages_held, others))} pages", LEASE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    wait_whole(cluster)
    outcomes = running.check(may_break=name == "gateway")
    assert name == "gateway" or outcomes[RIGHT] == len(running.orders), outcomes
    check_serves(cluster, files, PROMPTS[1])
    assert {w["id"]: w["boot_id"] for w in cluster.workers() if w["role"] != "sidecar"} == boots


@pytest.mark.slow
def test_nats_is_frozen(cluster: RealCluster, files: Files) -> None:
    """Longer than a worker may be silent; nobody is taken for lost, because nobody could be heard."""
    boots = {worker["id"]: worker["boot_id"] for worker in cluster.workers()}
    with load(cluster) as running:
        running.wait_for_tokens(4)
        pid = cluster.signal("nats-server", signal.SIGSTOP)
        try:
            time.sleep(4.0)
        finally:
            os.kill(pid, signal.SIGCONT)
    wait_whole(cluster)
    outcomes = running.check()
    assert outcomes[RIGHT] >= 9, outcomes
    check_serves(cluster, files, PROMPTS[1])
    assert {worker["id"]: worker["boot_id"] for worker in cluster.workers()} == boots
