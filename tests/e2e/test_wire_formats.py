"""Every wire format through the whole path over tcp: exact ones give the golden tokens, lossy ones run only where they
are asked for, and what ran is told."""

import asyncio
from collections.abc import Iterator

import pytest

from shared.transfer.formats.catalog import LOSSINESS, available
from tests.support_client import Answer, complete
from tests.support_cluster import RealCluster
from tests.support_golden import GoldenCase, golden_cases

CASES = [case for case in golden_cases() if len(case.prompt) in (127, 129)]
"""Two chunks and a part of a page, and three chunks."""
REMOTE = {"path": "remote", "strict": True, "timings": True}
SHARE = {"raw": (1, 1), "lossless": (0.5, 0.95), "fp16": (0.49, 0.52), "int8": (0.26, 0.3), "fp8": (0.26, 0.3)}
"""Least and most bytes on the wire, of those in the pages."""


@pytest.fixture(scope="module")
def tcp_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    settings = {"sidecar.transfer": "tcp", "common.prefill_chunk": 64}
    with RealCluster(tmp_path_factory.mktemp("formats"), settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def poor_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """Its sidecars have exact formats only."""
    settings = {"sidecar.transfer": "tcp", "sidecar.wire_formats": "raw,lossless", "gateway.kv_precision": "int8"}
    with RealCluster(tmp_path_factory.mktemp("poor"), settings=settings, warm=False) as running:
        yield running


async def ask(cluster: RealCluster, cases: list[GoldenCase], **baton: object) -> list[Answer]:
    async with cluster.async_client() as http:
        options = {**REMOTE, **baton}
        return await asyncio.gather(*(complete(http, baton=options, **case.body()) for case in cases))


def check_golden(cases: list[GoldenCase], answers: list[Answer]) -> None:
    for case, answer in zip(cases, answers, strict=True):
        first = case.difference(answer.token_ids)
        assert first is None or case.excuses(first), (case.name, first, answer.token_ids)


@pytest.mark.parametrize("name", [None, *LOSSINESS])
async def test_each_format_hands_over(tcp_cluster: RealCluster, name: str | None) -> None:
    """None: as a client that knows nothing of it."""
    ran = name or "lossless"
    answers = await ask(tcp_cluster, CASES, **({} if name is None else {"kv_precision": name}))
    for case, answer in zip(CASES, answers, strict=True):
        told = answer.body["baton"]["timings"]
        assert (told["kv_precision"], told["wire_format"], told["backend"]) == (ran, ran, "tcp")
        least, most = SHARE.get(ran, (0.05, 0.25))
        assert told["bytes"].keys() == told["wire_bytes"].keys()
        assert least <= told["wire_bytes"]["kv"] / told["bytes"]["kv"] <= most
        assert answer.token_ids[0] == case.tokens[0], "P computed it before anything could be lost"
    if not LOSSINESS[ran]:
        check_golden(CASES, answers)
    elif ran == "fp16":
        pairs = zip(answers[0].token_ids, CASES[0].tokens, strict=True)
        same = [ours == golden for ours, golden in pairs]
        assert sum(same) > len(same) / 2
    tcp_cluster.settled()
    assert tcp_cluster.counter("prefill", f"wire_format_{ran}") >= len(CASES)


async def test_auto_takes_what_pays(tcp_cluster: RealCluster) -> None:
    """The link to a process of the same host is fast enough for every bit."""
    answers = await ask(tcp_cluster, CASES[:1], kv_precision="auto")
    told = answers[0].body["baton"]["timings"]
    assert told["kv_precision"] == "auto"
    assert not LOSSINESS[told["wire_format"]]
    check_golden(CASES[:1], answers)
    tcp_cluster.settled()


def test_the_cluster_shows_what_is_there_and_what_is_asked_for(tcp_cluster: RealCluster) -> None:
    for role in ("prefill", "decode"):
        for worker in tcp_cluster.workers(role):
            assert tuple(worker["link"]["formats"]) == available()
    assert [gateway["settings"]["kv_precision"] for gateway in tcp_cluster.workers("gateway")] == ["lossless"]


def test_what_is_no_precision_is_refused(tcp_cluster: RealCluster) -> None:
    answer = tcp_cluster.complete(prompt=[1, 2, 3], max_tokens=2, baton={"kv_precision": "int3"})
    assert answer.status == 400
    assert answer.body["error"]["param"] == "baton.kv_precision"
    assert answer.body["error"]["type"] == "invalid_request_error"


async def test_what_is_not_there_comes_exact_and_says_so(poor_cluster: RealCluster) -> None:
    """Asked for by the gateway's default."""
    answers = await ask(poor_cluster, CASES)
    check_golden(CASES, answers)
    for answer in answers:
        told = answer.body["baton"]["timings"]
        assert (told["kv_precision"], told["wire_format"]) == ("int8", "lossless")
    poor_cluster.settled()
    assert poor_cluster.counter("prefill", "wire_format_fallbacks") == 2


async def test_shared_memory_moves_it_as_it_is(cluster: RealCluster) -> None:
    answers = await ask(cluster, CASES[:1], kv_precision="fp8")
    check_golden(CASES[:1], answers)
    told = answers[0].body["baton"]["timings"]
    assert (told["kv_precision"], told["wire_format"], told["backend"]) == ("fp8", "raw", "shm")
    assert told["wire_bytes"] == told["bytes"]
    cluster.settled()
