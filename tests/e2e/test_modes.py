"""Clusters without prefill workers: the same tokens, the same API, and everybody says which mode it is."""

import asyncio
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support_answers import COMPLETIONS
from tests.support_client import body_of, complete, poll
from tests.support_cluster import RealCluster
from tests.support_golden import GoldenCase, golden_cases
from tests.support_visitor import Visitor, prompt_of, tickets

FLAGS = {"colocated": ("--mode", "colocated"), "chunked": ("--mode", "chunked", "--step-tokens", "64")}
PROMPT = [504, 3575, 282, 4649, 314]
SOME = [case for case in golden_cases() if case.user is not None or case.name in ("text-129", "text-513")]


@pytest.fixture(scope="module", params=list(FLAGS))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    mode: str = request.param
    with RealCluster(tmp_path_factory.mktemp(mode), prefill=0, decode=2, flags=FLAGS[mode]) as cluster:
        yield cluster


def mode_of(cluster: RealCluster) -> str:
    return str(cluster.cluster()["mode"])


async def run_golden(cluster: RealCluster, cases: list[GoldenCase]) -> None:
    """All at once, so that prompts are computed beside running requests."""
    before = [cluster.counter("decode", name) for name in ("prompt_tokens_computed", "tokens_generated")]
    options = {"path": "auto", "strict": True, "timings": True}
    async with cluster.async_client() as http:
        answers = await asyncio.gather(*(complete(http, baton=options, **case.body()) for case in cases))
    excused, wrong = [], []
    for case, answer in zip(cases, answers, strict=True):
        assert answer.path == "local"
        assert answer.body["baton"]["timings"]["bytes"] == {}
        if (first := case.difference(answer.token_ids)) is not None:
            (excused if case.excuses(first) else wrong).append((case.name, first, answer.token_ids[first:][:4]))
    cluster.settled()
    after = [cluster.counter("decode", name) for name in ("prompt_tokens_computed", "tokens_generated")]
    print(f"{mode_of(cluster)}: {len(cases)} requests, {len(excused)} near ties excused: {excused}")
    assert not wrong
    assert after[0] - before[0] == sum(len(case.prompt) for case in cases)
    assert after[1] - before[1] == sum(len(answer.token_ids) for answer in answers)


async def test_golden(running: RealCluster) -> None:
    await run_golden(running, SOME)
    worked = [worker["counters"]["prompt_tokens_computed"] > 3 for worker in running.workers("decode")]
    assert worked == [True, True], "both have had a part of it"


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_golden_all(running: RealCluster) -> None:
    await run_golden(running, golden_cases())


def test_everybody_says_which_mode_it_is(running: RealCluster, request: pytest.FixtureRequest) -> None:
    mode = mode_of(running)
    assert f"[{mode}]" in request.node.name
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok", "mode": mode}
    roles = [worker["role"] for worker in running.workers()]
    assert roles == ["decode", "decode", "gateway", "kvstore", "sidecar", "sidecar"]
    settings = [worker["settings"] for worker in running.workers() if worker["role"] in ("decode", "gateway")]
    assert [each["mode"] for each in settings] == [mode] * 3
    assert f"({mode}, 2 decode, " in running.log()


@pytest.mark.parametrize("strict", [False, True])
def test_a_remote_path_is_the_clients_mistake(running: RealCluster, strict: bool) -> None:
    answer = running.complete(prompt=PROMPT, max_tokens=1, baton={"path": "remote", "strict": strict})
    assert (answer.status, answer.body["error"]["param"]) == (400, "baton.path")
    assert f"mode '{mode_of(running)}' and has no prefill workers" in answer.body["error"]["message"]
    assert running.complete(prompt=PROMPT, max_tokens=1, baton={"path": "local"}).path == "local"


def test_a_client_that_leaves_in_the_middle_of_its_prompt_frees_all(running: RealCluster) -> None:
    with Visitor(running, prompt=prompt_of(700), max_tokens=64):
        poll(lambda: any(tickets(running, f"decode-{k}", "started") for k in (0, 1)), "nobody computes it", 20.0)
    running.settled()


def test_a_worker_that_drains_ends_what_it_has_and_the_other_goes_on(running: RealCluster) -> None:
    with Visitor(running, prompt=PROMPT, max_tokens=48, ignore_eos=True) as visitor:
        poll(lambda: sum(tickets(running, f"decode-{k}") for k in (0, 1)), "nobody has it", 20.0)
        name = next(f"decode-{k}" for k in (0, 1) if tickets(running, f"decode-{k}"))
        pid = running.signal(name, signal.SIGTERM)
        began = time.monotonic()
        answer = httpx.post(running.url + COMPLETIONS, json=body_of(prompt=PROMPT, max_tokens=4), timeout=60.0)
        assert answer.status_code == 200, f"{answer.text} after {time.monotonic() - began:.1f} s"
        seen = visitor.stay()
        assert (seen.error, seen.finishes) == (None, ["length"])
    running.wait_ready(name, other_than=pid)
    assert running.health() == 200
    running.mark()
