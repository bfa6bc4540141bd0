"""Bytes that arrive are not those that were sent: D says so instead of going on with them, after P has done all its
work. P's pages come free at once all the same, and the client is told."""

from collections.abc import Iterator

import pytest

from tests.support_chaos import check_error
from tests.support_client import poll
from tests.support_cluster import RealCluster
from tests.support_visitor import Visitor, held, prompt_of, report_of

AT_ONCE_S = 30.0
"""Much less than P waits for a decode worker that does not answer."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    settings = {"sidecar.faults": "transfer.corrupt=1", "prefill.commit_timeout_s": 120}
    with RealCluster(tmp_path_factory.mktemp("spoiled"), settings=settings, warm=False) as running:
        yield running


def test_d_refuses_spoiled_state_and_p_lets_go_at_once(cluster: RealCluster) -> None:
    nothing = held(cluster)
    with Visitor(cluster, prompt=prompt_of(300), max_tokens=8, baton={"path": "remote", "strict": True}) as visitor:
        seen = visitor.stay()
    assert seen.error is not None
    check_error(seen)
    assert seen.error["code"] == "corrupt_state", seen.error
    assert sum(map(len, seen.tokens)) <= 1, "what D has computed from them is no answer"
    # In one poll: a report from before the request holds nothing either.
    poll(
        lambda: (
            held(cluster) == nothing and report_of(cluster, "decode-0")["counters"].get("tickets_corrupt_state", 0) >= 1
        ),
        lambda: f"{cluster.workers()}",
        AT_ONCE_S,
    )
    assert report_of(cluster, "prefill-0")["counters"].get("tickets_finished", 0) == 0
    cluster.settled()


def test_what_needs_no_transfer_is_served(cluster: RealCluster) -> None:
    answer = cluster.complete(prompt=prompt_of(40), max_tokens=4, baton={"path": "local"})
    assert answer.status == 200
    assert answer.path == "local"
    cluster.settled()
