"""A cluster whose state moves by NIXL: the same tokens, and everybody says which way was asked for and which ran."""

from collections.abc import Iterator

import pytest

from tests.contract.transfer_links import NIXL
from tests.support_cluster import RealCluster
from tests.support_golden import golden_cases

pytestmark = [pytest.mark.slow, *NIXL.marks]


@pytest.fixture(scope="module")
def over_nixl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with RealCluster(tmp_path_factory.mktemp("nixl"), settings={"common.transfer": "nixl,tcp"}) as cluster:
        yield cluster


def test_the_tokens_are_golden_and_the_way_is_said(over_nixl: RealCluster) -> None:
    for case in golden_cases()[:3]:
        answer = over_nixl.complete(baton={"timings": True, "path": "remote", "strict": True}, **case.body())
        first = case.difference(answer.token_ids)
        assert first is None or case.excuses(first)
        timings = answer.body["baton"]["timings"]
        assert (timings["backend_asked"], timings["backend"]) == ("nixl,tcp", "nixl")
    for worker in over_nixl.workers("prefill") + over_nixl.workers("decode"):
        assert worker["link"]["backends"] == ["nixl", "tcp"]
        assert worker["link"]["asked"] == worker["settings"]["transfer"] == "nixl,tcp"
    over_nixl.settled()
    moved = [sidecar["counters"].get("received_nixl_bytes", 0) for sidecar in over_nixl.workers("sidecar")]
    assert max(moved) > 0
