"""Clients that leave in each phase of a request, and workers that do. Every process lets go of what it held for them
within a second after the step that was running, or when the other one's lease is over. Transfers are slow, so that each
phase lasts long enough to be met."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.support_chaos import check_error, wait_whole
from tests.support_client import poll
from tests.support_cluster import RealCluster
from tests.support_visitor import (
    Held,
    Visitor,
    held,
    pages_held,
    prompt_of,
    report_of,
    tickets,
    wait_released,
)

POOL, WHOLE, MOST, SHORT = 41, 640, 480, 60
"""Pages of either pool; tokens of a prompt that fills it, of one that leaves room for a short one, and of that."""
RELEASE_S = 1.0
STEP_S = 9.0
"""What the step that was running may take on top, where a few cores are shared with many others."""
PHASE_S = 120.0
LEASE_S = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    settings = {
        "common.heartbeat_s": 0.1,
        "prefill.num_pages": POOL,
        "prefill.prefill_chunk": 64,
        "prefill.commit_timeout_s": 3,
        "decode.num_pages": POOL,
        "decode.growth_tokens": 16,
        "decode.prefill_chunk": 64,
        "sidecar.faults": "transfer.delay_s=0.01",
    }
    with RealCluster(tmp_path_factory.mktemp("leaving"), settings=settings) as running:
        yield running


@dataclass(frozen=True)
class Phase:
    """length: of the client's prompt. reached: whether it is in the phase. blocker: length and path of the prompt
    before it, that keeps the workers busy."""

    length: int
    reached: Callable[[RealCluster, Visitor], bool]
    blocker: tuple[int, str] | None = None


PHASES = {
    "queued": Phase(SHORT, lambda c, v: report_of(c, "gateway")["queues"]["waiting"] == 1, (WHOLE, "remote")),
    "reserved": Phase(
        SHORT,
        lambda c, v: tickets(c, "decode-0") == 2 and tickets(c, "decode-0", "reserved") >= 1 and not v.num_tokens,
        (MOST, "remote"),
    ),
    "prefilling": Phase(
        WHOLE, lambda c, v: tickets(c, "prefill-0", "computing") == 1 and tickets(c, "decode-0", "reserved") == 1
    ),
    "first chunk": Phase(WHOLE, lambda c, v: tickets(c, "decode-0", "filling") == 1 and not v.num_tokens),
    "last chunk": Phase(WHOLE, lambda c, v: tickets(c, "decode-0", "filling") == 1 and v.num_tokens == 1),
    "committed": Phase(
        SHORT,
        lambda c, v: tickets(c, "decode-0", "committed", "started") == 2 and v.num_tokens == 1,
        (MOST, "local"),
    ),
    "decoding": Phase(SHORT, lambda c, v: v.num_tokens >= 3),
}


@pytest.mark.parametrize("name", PHASES)
def test_the_client_leaves(cluster: RealCluster, name: str) -> None:
    phase = PHASES[name]
    with ExitStack() as stack:
        before = block(cluster, phase, stack) if phase.blocker is not None else held(cluster)
        visitor = Visitor(cluster, prompt=prompt_of(phase.length, 1), max_tokens=300, ignore_eos=True)
        stack.enter_context(visitor)
        poll(lambda: phase.reached(cluster, visitor), lambda: f"never {name}: {cluster.workers()}", PHASE_S)
        took_s = wait_released(cluster, before, visitor.leave(), RELEASE_S + STEP_S)
        print(f"\n{name}: all released {took_s:.2f} s after the client left")
    cluster.settled()


def block(cluster: RealCluster, phase: Phase, stack: ExitStack) -> Held:
    """Keeps the workers busy, until the stack is left. What they hold for it, or soon will."""
    assert phase.blocker is not None
    length, path = phase.blocker
    blocker = Visitor(cluster, prompt=prompt_of(length), max_tokens=16, ignore_eos=True, baton={"path": path})
    stack.enter_context(blocker)
    worker, state = ("prefill-0", "computing") if path == "remote" else ("decode-0", "started")

    def has_begun() -> bool:
        """By everybody's own word: reports do not come in at the same time."""
        is_active = report_of(cluster, "gateway")["queues"]["active"] == 1
        return is_active and tickets(cluster, "decode-0") == 1 and tickets(cluster, worker, state) == 1

    poll(has_begun, "the blocker does not begin", PHASE_S)
    return held(cluster) | {"prefill-0-sidecar tickets": 1, "decode-0-sidecar tickets": 1}


def computed(cluster: RealCluster) -> float:
    return float(report_of(cluster, "prefill-0")["counters"].get("prompt_tokens_computed", 0.0))


def test_a_client_that_leaves_early_stops_the_prompts_computation(cluster: RealCluster) -> None:
    """It leaves in the first of ten chunks, and not all others are computed; the next request does not hang."""
    before = computed(cluster)
    with Visitor(cluster, prompt=prompt_of(WHOLE, 2), max_tokens=8):
        poll(lambda: tickets(cluster, "prefill-0", "computing") == 1, "the prompt does not begin", PHASE_S)
    cluster.settled()
    assert computed(cluster) - before < WHOLE
    assert Visitor(cluster, prompt=prompt_of(SHORT), max_tokens=4).stay().error is None
    cluster.settled()


def test_what_d_has_no_room_for_is_not_prefilled(cluster: RealCluster) -> None:
    """Ten requests, two of which fill D: the others wait at the gateway, where they cost nobody a page."""
    granted = cluster.counter("prefill", "tickets_granted")
    with ExitStack() as stack:
        visitors = [
            Visitor(cluster, prompt=prompt_of(300, 20 + k), max_tokens=16, ignore_eos=True, baton={"path": "remote"})
            for k in range(10)
        ]
        for visitor in visitors:
            stack.enter_context(visitor)
        # In one poll: reports of different processes do not come in at the same time.
        poll(
            lambda: (
                tickets(cluster, "decode-0") == 2
                and report_of(cluster, "gateway")["queues"]["waiting"] == 8
                and cluster.counter("prefill", "tickets_granted") - granted == 2
            ),
            lambda: f"not two begin and eight wait: {cluster.workers()}",
            PHASE_S,
        )
        for visitor in visitors[4:]:
            visitor.leave()
        assert [visitor.stay().error for visitor in visitors[:4]] == [None] * 4
    cluster.settled()


def test_a_frozen_decode_worker_does_not_fill_the_prefill_worker(cluster: RealCluster) -> None:
    """D stops with state on its way: P keeps no page for it beyond the lease, whatever else is asked for meanwhile, and
    every client is told. Woken, D lets go as well."""
    port = report_of(cluster, "prefill-0")["http_port"]
    with ExitStack() as stack:
        visitors = [Visitor(cluster, prompt=prompt_of(WHOLE, 40), max_tokens=8)]
        poll(lambda: tickets(cluster, "decode-0", "filling") == 1, "no bytes come", PHASE_S)
        pid = cluster.signal("decode-0", signal.SIGSTOP)
        try:
            visitors += [Visitor(cluster, prompt=prompt_of(MOST, 41 + k), max_tokens=8) for k in range(4)]
            for visitor in visitors:
                stack.enter_context(visitor)
            poll(lambda: not pages_held(port), lambda: f"{pages_held(port)} pages", LEASE_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        for seen in [visitor.stay() for visitor in visitors]:
            if seen.error is not None:
                check_error(seen)
    wait_whole(cluster)
    cluster.settled(files=False)
    assert Visitor(cluster, prompt=prompt_of(SHORT), max_tokens=4).stay().error is None
    cluster.settled(files=False)


def test_a_prefill_worker_that_dies_before_its_first_byte_leaves_no_page_reserved(cluster: RealCluster) -> None:
    cluster.expect_trouble = True
    port = report_of(cluster, "decode-0")["http_port"]
    baton = {"path": "remote", "strict": True}
    with Visitor(cluster, prompt=prompt_of(WHOLE, 50), max_tokens=8, baton=baton) as visitor:
        poll(lambda: tickets(cluster, "decode-0", "reserved") == 1, "nothing is reserved", PHASE_S)
        gone = cluster.kill("prefill-0")
        poll(lambda: not pages_held(port), lambda: f"{pages_held(port)} pages", LEASE_S)
        seen = visitor.stay()
    if seen.error is not None:
        check_error(seen)
    wait_whole(cluster, "prefill-0", other_than=gone)
    assert Visitor(cluster, prompt=prompt_of(SHORT), max_tokens=4, baton=baton).stay().error is None
    cluster.settled(files=False)
