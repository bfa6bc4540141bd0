"""Decode workers whose pages run out under real requests: the youngest gives way, and its client sees nothing of it."""

import asyncio
from pathlib import Path
from typing import Any

from tests.support_answers import Seen, see_body
from tests.support_client import complete
from tests.support_cluster import RealCluster
from tests.support_replay import Asked, Given, judge

NUM_PAGES, PROMPT_LEN, MAX_TOKENS = 16, 30, 64
"""Five requests fit into 16 pages of 16 tokens when they begin, and two when they end."""
SETTINGS = {
    "decode.num_pages": NUM_PAGES,
    "decode.growth_tokens": 16,
    "decode-0.stash_bytes": "64MiB",
    "decode-1.stash_bytes": "0",
}


def asked(number: int) -> Asked:
    """Two prompts, several draws."""
    prompt = tuple((k * 37 + number % 2 * 1009) % 40_000 + 100 for k in range(PROMPT_LEN + number % 2))
    temperature = 0.7 if number > 1 else 0.0
    return Asked(prompt, MAX_TOKENS, temperature=temperature, seed=number, ignore_eos=True)


def body(request: Asked, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": request.temperature, "seed": request.seed, "max_tokens": MAX_TOKENS}
    return {
        "prompt": list(request.prompt),
        "ignore_eos": True,
        "logprobs": 1,
        "baton": {"path": "remote"},
        **sampling,
        **more,
    }


def given_of(request: Asked, seen: Seen, n: int) -> list[Given]:
    assert seen.error is None, seen
    assert sorted(seen.choices) == list(range(n))
    return [Given(request, choice, index) for index, choice in seen.choices.items()]


async def test_requests_that_outgrow_the_pool_together_end_with_the_right_tokens(tmp_path: Path) -> None:
    """decode-0 keeps their state in host memory, decode-1 computes it again."""
    requests = [asked(number) for number in range(10)]
    copies = [2 if number >= 8 else 1 for number in range(10)]
    with RealCluster(tmp_path, decode=2, settings=SETTINGS) as cluster:
        async with cluster.async_client() as http:
            pairs = zip(requests, copies, strict=True)
            answers = await asyncio.gather(*(complete(http, **body(request, n=n)) for request, n in pairs))
        cluster.settled()
        keeping, computing = (worker["counters"] for worker in cluster.workers("decode"))
        assert [worker["stashed_bytes"] for worker in cluster.workers("decode")] == [0, 0]
    assert keeping["preemptions_stashed"] == keeping["preemptions"] > 0
    assert computing["preemptions_recomputed"] == computing["preemptions"] > 0
    assert (keeping["tokens_dropped"], computing["tokens_dropped"] > 0) == (0, True)
    given: dict[tuple[int, ...], list[Given]] = {}
    for request, n, answer in zip(requests, copies, answers, strict=True):
        assert answer.path == "remote"
        seen = see_body(answer.status, answer.path, answer.body)
        given.setdefault(request.prompt, []).extend(given_of(request, seen, n))
    excused = sum(judge(prompt, several) for prompt, several in given.items())
    assert excused <= 1 + sum(copies) * MAX_TOKENS // 200
