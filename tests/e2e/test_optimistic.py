"""Prompts that are computed before their decode worker has said where to: with a real pool that is too small for them,
and a decode worker whose sidecar keeps them waiting."""

import asyncio
import signal
from pathlib import Path

from tests.support_answers import see_body
from tests.support_client import complete, poll
from tests.support_cluster import RealCluster
from tests.support_replay import Asked, Given, judge

NUM_PAGES, PROMPT_LEN, MAX_TOKENS = 12, 100, 8
"""One prompt takes 7 pages of 16 tokens: of two that are computed ahead, one must give way."""
SETTINGS = {
    "prefill.num_pages": NUM_PAGES,
    "prefill.prefill_chunk": 32,
    "prefill.optimistic_attempts": 1,
}


def asked(number: int) -> Asked:
    """Two prompts, several draws."""
    prompt = tuple((k * 37 + number % 2 * 1009) % 40_000 + 100 for k in range(PROMPT_LEN - number % 2))
    return Asked(prompt, MAX_TOKENS, temperature=0.7, seed=number, ignore_eos=True)


async def test_prompts_computed_ahead_give_way_and_come_back_with_the_right_tokens(tmp_path: Path) -> None:
    requests = [asked(number) for number in range(4)]

    def body(request: Asked) -> dict[str, object]:
        sampling = {"temperature": request.temperature, "seed": request.seed, "max_tokens": MAX_TOKENS}
        options = {"ignore_eos": True, "logprobs": 1, "baton": {"path": "remote"}}
        return {"prompt": list(request.prompt), **sampling, **options}

    def has_yielded() -> bool:
        worker = cluster.worker("prefill-0")
        return worker is not None and worker["counters"]["preemptions"] > 0

    with RealCluster(tmp_path, settings=SETTINGS) as cluster:
        cluster.signal("decode-0-sidecar", signal.SIGSTOP)  # D says where to only once that is open
        async with cluster.async_client() as http:
            try:
                waiting = [asyncio.create_task(complete(http, **body(request))) for request in requests]  # noqa: TID251
                await asyncio.to_thread(
                    poll, has_yielded, lambda: f"nobody gave way: {cluster.worker('prefill-0')}", 20.0
                )
            finally:
                cluster.signal("decode-0-sidecar", signal.SIGCONT)
            answers = await asyncio.gather(*waiting)
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
