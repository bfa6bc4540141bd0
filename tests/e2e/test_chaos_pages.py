"""Pages that go from one request to the next in the middle of a slow transfer, over shared memory and TCP: nobody's
tokens change, and no transfer has to be repeated for it."""

from collections.abc import Iterator

import pytest

from tests.support_answers import Seen
from tests.support_chaos import RIGHT, Load, Order
from tests.support_client import poll
from tests.support_cluster import RealCluster
from tests.support_replay import Asked, Given, judge
from tests.support_visitor import Visitor, prompt_of, report_of, tickets

POOL, WHOLE = 41, 640
"""Pages of either pool, and a prompt that fills it, but for the page of the first answer tokens."""
PHASE_S = 120.0


@pytest.fixture(scope="module", params=["shm", "tcp"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    settings = {
        "common.transfer": request.param,
        "prefill.num_pages": POOL,
        "prefill.prefill_chunk": 128,
        "decode.num_pages": POOL,
        "decode.growth_tokens": 16,
        "sidecar.faults": "transfer.delay_s=0.01",
    }
    with RealCluster(tmp_path_factory.mktemp("pages"), settings=settings) as running:
        yield running


@pytest.mark.parametrize("when", ["reserved", "filling"])
def test_pages_of_a_client_that_left_go_to_the_next_request(cluster: RealCluster, when: str) -> None:
    """Both need the whole pool, so the second gets exactly the pages into which the first one's state is on its way."""
    prompt = prompt_of(WHOLE, 4)
    with Visitor(cluster, prompt=prompt_of(WHOLE, 3), max_tokens=16, ignore_eos=True) as first:
        poll(lambda: tickets(cluster, "decode-0", when) == 1, f"never {when}", PHASE_S)
        baton = {"path": "remote", "timings": True}
        second = Visitor(cluster, prompt=prompt, max_tokens=6, ignore_eos=True, baton=baton)
        poll(lambda: report_of(cluster, "gateway")["queues"]["waiting"] == 1, "the second does not wait", PHASE_S)
        first.leave()
        check(second.stay(), Asked(tuple(prompt), 6, ignore_eos=True))
    cluster.settled()


def check(seen: Seen, asked: Asked) -> None:
    """By the hand-off, at the first try, and with the model's tokens."""
    assert seen.error is None, seen.error
    assert seen.baton is not None
    assert (seen.baton["path"], seen.baton["timings"]["attempts"]) == ("remote", 1)
    assert judge(asked.prompt, [Given(asked, choice) for choice in seen.choices.values()]) <= 1


def test_source_pages_hold_still_while_other_prompts_wait_for_them(cluster: RealCluster) -> None:
    """More prompts at once than P's pool holds, and slow transfers out of it: no page is written before it was read."""
    asked = [Asked(tuple(prompt_of(200, 10 + k)), 4, 0.8 * (k % 2), seed=k, ignore_eos=True) for k in range(6)]
    orders = [Order(one, stream=k % 2 == 0, baton={"path": "remote", "strict": True}) for k, one in enumerate(asked)]
    before = cluster.counter("gateway", "attempts_retried")
    with Load(cluster.url, orders) as load:
        pass
    assert load.check()[RIGHT] == len(orders)
    cluster.settled()
    assert cluster.counter("gateway", "attempts_retried") == before
