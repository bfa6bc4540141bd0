"""Prompts that are computed before their decode worker has said where to: with a real pool that is too small for them,
and a decode worker whose sidecar keeps them waiting."""

import asyncio
import contextlib
import signal
from pathlib import Path

import httpx

from tests.support_answers import see_body
from tests.support_client import Answer, complete
from tests.support_cluster import RealCluster
from tests.support_replay import Asked, Given, judge

NUM_PAGES, PROMPT_LEN, MAX_TOKENS = 12, 100, 8
"""One prompt takes 7 pages of 16 tokens: of two that are computed ahead, one must give way."""
FROZEN_S, ROUNDS = 8.0, 5
"""D kills a sidecar of its own that is silent for ten seconds, so it must be woken before; a machine that is too busy
to compute both prompts within that gets further chances."""
SETTINGS = {
    "prefill.num_pages": NUM_PAGES,
    "prefill.prefill_chunk": 32,
    "prefill.optimistic_attempts": 1,
}


def asked(number: int) -> Asked:
    """Two prompts, several draws."""
    prompt = tuple((k * 37 + number % 2 * 1009) % 40_000 + 100 for k in range(PROMPT_LEN - number % 2))
    return Asked(prompt, MAX_TOKENS, temperature=0.7, seed=number, ignore_eos=True)


async def held_up(
    cluster: RealCluster, http: httpx.AsyncClient, bodies: list[dict[str, object]]
) -> tuple[list[Answer], bool]:
    """The answers to requests for which D cannot say where to until one of them has given way, or until FROZEN_S have
    passed; and whether one has."""

    async def preemptions() -> float:
        workers = (await http.get("/cluster")).json()["workers"]
        return sum(worker["counters"].get("preemptions", 0.0) for worker in workers if worker["role"] == "prefill")

    await asyncio.to_thread(cluster.settled, files=False)
    before = await preemptions()
    cluster.signal("decode-0-sidecar", signal.SIGSTOP)  # D says where to only once that is open
    waiting = [asyncio.create_task(complete(http, **body)) for body in bodies]  # noqa: TID251
    has_yielded = False
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FROZEN_S):
                while not has_yielded:
                    await asyncio.sleep(0.05)
                    has_yielded = await preemptions() > before
    finally:
        cluster.signal("decode-0-sidecar", signal.SIGCONT)
    return await asyncio.gather(*waiting), has_yielded


async def test_prompts_computed_ahead_give_way_and_come_back_with_the_right_tokens(tmp_path: Path) -> None:
    requests = [asked(number) for number in range(4)]

    def body(request: Asked) -> dict[str, object]:
        sampling = {"temperature": request.temperature, "seed": request.seed, "max_tokens": MAX_TOKENS}
        options = {"ignore_eos": True, "logprobs": 1, "baton": {"path": "remote"}}
        return {"prompt": list(request.prompt), **sampling, **options}

    with RealCluster(tmp_path, settings=SETTINGS) as cluster:
        async with cluster.async_client() as http:
            for _ in range(ROUNDS):
                answers, has_yielded = await held_up(cluster, http, list(map(body, requests)))
                if has_yielded:
                    break
        assert has_yielded, f"nobody gave way: {cluster.worker('prefill-0')}"
        cluster.settled()
        [prefill] = cluster.workers("prefill")
        assert prefill["stashed_bytes"] == 0
        counters = prefill["counters"]
    assert counters["preemptions_stashed"] == counters["preemptions"]
    assert counters["tokens_dropped"] == 0
    given: dict[tuple[int, ...], list[Given]] = {}
    for request, answer in zip(requests, answers, strict=True):
        seen = see_body(answer.status, answer.path, answer.body)
        assert (seen.error, answer.path) == (None, "remote"), answer
        given.setdefault(request.prompt, []).append(Given(request, seen.choices[0]))
    assert sum(judge(prompt, several) for prompt, several in given.items()) <= 1  # excused
