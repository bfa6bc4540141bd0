"""Decode workers behind a wire that breaks under load: bytes between the sidecars vanish, stall or are cut off, while
control messages go on. What is on its way goes elsewhere or ends with an error that says so; nobody gets a wrong token.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support_chaos import DEADLINE_S, RIGHT, Load, Order, check_serves, wait_whole
from tests.support_client import poll
from tests.support_cluster import RealCluster
from tests.support_processes import open_files
from tests.support_replay import Asked
from tests.support_wire import Break, Wire

HERE, BEHIND = "127.0.0.1", "127.0.0.2"
"""What peers are told, where the wires listen; and where the sidecars do."""
PROMPT = tuple(range(100, 130))
Wires = dict[str, Wire]


@pytest.fixture(scope="module")
def wires() -> Iterator[Wires]:
    """In front of each decode worker's sidecar, on the same port of another address."""
    with ExitStack() as stack:
        made = {}
        for name in ("decode-0", "decode-1"):
            wire = stack.enter_context(Wire((BEHIND, 0), (HERE, 0)))
            wire.target = (BEHIND, wire.address[1])
            made[name] = wire
        yield made


@pytest.fixture(scope="module")
def cluster(wires: Wires, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    settings: dict[str, object] = {
        "common.transfer": "tcp",
        "common.kv_bytes": "256MiB",
        "gateway.request_timeout_s": DEADLINE_S,
        "sidecar.stall_timeout_s": 2,
        "sidecar.peer_timeout_s": 2,
    }
    for name, wire in wires.items():
        settings |= {f"{name}.tcp_port": wire.address[1], f"{name}.listen_host": BEHIND}
    with RealCluster(tmp_path_factory.mktemp("wire"), prefill=1, decode=2, settings=settings) as running:
        yield running


def orders() -> list[Order]:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(100, 40_000) for _ in range(length)) for length in (8, 40, 280)]
    asked = [Asked(prompts[k % 3], 12, 0.8 * (k % 2), seed=k, ignore_eos=True) for k in range(12)]
    return [Order(one, stream=k % 4 < 2, baton={"path": "remote"}) for k, one in enumerate(asked)]


SLOW_ONES = [pytest.param(fault, marks=pytest.mark.slow) for fault in (Break.HALF, Break.END)]


@pytest.mark.parametrize("fault", [Break.HOLE, Break.RESET, *SLOW_ONES], ids=lambda fault: fault.value)
def test_the_wire_to_one_decode_worker_breaks(cluster: RealCluster, wires: Wires, fault: Break) -> None:
    files, wire = open_files(cluster), wires["decode-0"]
    wire.break_after(fault, 100_000)
    try:
        with Load(cluster.url, orders()) as load:
            pass
        assert wire.is_broken
    finally:
        wire.heal()
    outcomes = load.check()
    assert outcomes[RIGHT] >= 4, outcomes
    check_serves(cluster, files, PROMPT)


def test_a_decode_worker_comes_back_on_the_same_port(cluster: RealCluster, wires: Wires) -> None:
    """It is another peer, though its address is the old one: what is on its way to the old one ends, and that alone;
    then the new one is served, by the connections of its own."""
    files, before = open_files(cluster), cluster.worker("decode-0-sidecar")
    assert before is not None
    with Load(cluster.url, orders()) as load:
        poll(lambda: any(order.num_tokens for order in load.orders), "no tokens come", DEADLINE_S)
        cluster.expect_trouble = True
        pid = cluster.kill("decode-0")
    wait_whole(cluster, "decode-0", other_than=pid)
    assert load.check()[RIGHT] >= 4
    after = cluster.worker("decode-0-sidecar")
    assert after is not None
    assert after["boot_id"] != before["boot_id"]
    assert (after["link"]["host"], after["link"]["port"]) == (before["link"]["host"], before["link"]["port"])
    check_serves(cluster, files, PROMPT)
    assert cluster.worker("decode-0-sidecar")["counters"].get("landed", 0) > 0  # type: ignore[index]
