"""A decode worker that runs out of pages: the youngest gives way, and its client sees nothing of it."""

import asyncio

import pytest

from shared.runtime.mode import Mode
from tests.sim.cluster import Cluster, prompt_of
from tests.sim.test_flows import oracles
from tests.sim.virtual_time import run_virtual

PLENTY = 1 << 20
SAMPLING = {
    "max_tokens": 40,
    "ignore_eos": True,
    "temperature": 0.8,
    "seed": 5,
    "n": 2,
    "frequency_penalty": 0.6,
    "logprobs": 2,
}
TIGHT = {"num_pages": 40, "growth_tokens": 4, "max_running": 12}
"""Two requests fit when they begin, but not when they end."""


@pytest.mark.parametrize("stash_bytes", [0, 4500, PLENTY], ids=["recompute", "small stash", "stash"])
@pytest.mark.parametrize(
    ("path", "mode"), [("remote", "separated"), ("local", "separated"), ("local", "colocated"), ("local", "chunked")]
)
def test_requests_that_outgrow_the_pool_together_end_with_the_right_tokens(
    path: str, mode: Mode, stash_bytes: int
) -> None:
    sizes = TIGHT | {"prefills": int(mode == "separated"), "step_tokens": 14}

    async def scenario() -> None:
        prompts = [prompt_of(9 + 3 * i, seed=i) for i in range(5)]
        async with Cluster(stash_bytes=stash_bytes, mode=mode, **sizes) as cluster:  # type: ignore[arg-type]
            asked = [cluster.ask(p, path=path, timeout_s=120, **SAMPLING) for p in prompts]  # type: ignore[arg-type]
            answers = await asyncio.gather(*asked)
            assert [a.error for a in answers] == [None] * 5
            assert [a.tokens for a in answers] == await oracles(prompts, **SAMPLING)
            stats = cluster.decodes[0].engine.stats
            assert stats.preemptions > 0
            assert stats.preemptions == stats.preemptions_stashed + stats.preemptions_recomputed
            assert (stats.preemptions_stashed > 0) is (stash_bytes > 0)
            assert (stats.tokens_dropped > 0) is (stash_bytes < PLENTY)
            if stash_bytes == PLENTY and path == "remote":
                assert stats.prompt_tokens_computed == 0
            await cluster.settle()

    run_virtual(scenario())


@pytest.mark.parametrize("end", ["client leaves", "deadline"])
@pytest.mark.parametrize("stash_bytes", [0, PLENTY], ids=["recompute", "stash"])
def test_a_preempted_request_that_ends_frees_its_host_memory(stash_bytes: int, end: str) -> None:
    async def scenario() -> None:
        async with Cluster(stash_bytes=stash_bytes, **TIGHT) as cluster:  # type: ignore[arg-type]
            decode, loop = cluster.decodes[0], asyncio.get_running_loop()
            old = loop.create_task(cluster.ask(prompt_of(20), **SAMPLING | {"max_tokens": 60}))
            await asyncio.sleep(0.2)
            limit_s = 0.5 if end == "deadline" else 60.0
            young = loop.create_task(cluster.ask(prompt_of(20, 1), timeout_s=limit_s, **SAMPLING | {"max_tokens": 60}))
            while "preempted" not in decode.desk.tickets.states():
                await asyncio.sleep(0.002)
            if stash_bytes:
                assert decode.engine.stashed_bytes > 0
            if end == "client leaves":
                young.cancel()
            await asyncio.wait({young})
            within = loop.time() + 0.1
            while decode.desk.tickets.states().keys() & {"preempted", "quarantined"}:
                assert loop.time() < within
                await asyncio.sleep(0.002)
            assert decode.engine.stashed_bytes == 0
            assert (await old).error is None
            await cluster.settle(1.0)

    run_virtual(scenario())
