"""Prompts that are computed before anybody takes their chunks: what is handed out is what it would have been."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.executor import InlineExecutor
from shared.engine.models.toy import Toy
from shared.runtime.errors import EngineError, PoolExhausted
from shared.transfer.link import TicketKey
from tests.support_ahead import PLENTY, A, B, ahead, go_on, parked, prompt_of, spec, take, until, watch_rows
from tests.support_engine import EngineBench, running, undivided


@pytest.mark.parametrize("length", [3, 16, 17, 40])
async def test_a_parked_prompt_comes_as_one_chunk_with_its_first_tokens(length: int) -> None:
    prompt = prompt_of(length, 1)
    async with running() as bench:
        ahead(bench, A, prompt, spec(1, n=2))
        await parked(bench, A)
        assert bench.engine.queues()["parked"] == 1
        generated = bench.engine.stats.tokens_generated
        [chunk] = await take(bench, A)
        assert (chunk.start, chunk.end, chunk.last) == (0, length, True)
        assert bench.engine.stats.tokens_generated == generated == 2
        await go_on(bench, A, [chunk], prompt, 2)
        await bench.engine.retire(A)
        assert bench.is_empty()


@pytest.mark.parametrize("at_step", [1, 2, 3])
async def test_asked_half_way_it_hands_out_what_is_there_and_goes_on(at_step: int) -> None:
    prompt = prompt_of(61, 1)
    async with running(executor=InlineExecutor(0.002), prefill_chunk=6) as bench:
        ahead(bench, A, prompt, spec(1))
        while bench.engine.stats.steps < at_step:
            await asyncio.sleep(0.001)
        chunks = await take(bench, A)
        assert chunks[0].start == 0
        assert chunks[0].end >= 6 * at_step
        assert [c.start for c in chunks[1:]] == [c.end for c in chunks[:-1]]
        assert len(chunks) > 2
        units = [u for c in chunks for p in c.pieces if p.component == 0 for u in p.units]
        assert len(units) == len(set(units)) == 16
        await go_on(bench, A, chunks, prompt, 1)
        await bench.engine.retire(A)
        assert bench.is_empty()


async def test_the_token_that_was_drawn_first_is_the_one_that_is_handed_out() -> None:
    """Also where the prompt had to be computed again: it is not drawn twice."""
    prompt = prompt_of(30, 1)
    async with running(num_pages=10) as bench:
        ahead(bench, A, prompt, spec(1, n=2, logprobs=2))
        await parked(bench, A)
        drawn = bench.engine._scheduler.groups[A].first
        bench.engine.reserve(B, prompt_of(25, 2), spec(2), decodes=False)
        await take(bench, B)
        await bench.engine.retire(B)
        generated = bench.engine.stats.tokens_generated
        chunks = await take(bench, A)
        assert bench.engine.stats.tokens_dropped == 30
        assert bench.engine.stats.tokens_generated == generated
        assert chunks[-1].first is drawn
        assert [t.token for t in drawn] == [tokens[0] for tokens in undivided(prompt, spec(1, n=2))]
        await go_on(bench, A, chunks, prompt, 2)


async def test_it_is_computed_beside_a_prompt_that_somebody_waits_for_only_when_that_leaves_time() -> None:
    async with running(prefill_chunk=4, max_step_tokens=64, prefill_lead=100) as bench:
        steps = watch_rows(bench)
        ahead(bench, A, prompt_of(40, 1), spec(1))
        await asyncio.sleep(0)
        bench.engine.reserve(B, prompt_of(20, 2), spec(2), decodes=False)
        await take(bench, B)
        await parked(bench, A)
        mixed = [step for step in steps if len(step) > 1]
        assert mixed == []
        first, last = (min if k == 0 else max for k in (0, 1))
        begun, ended = (f(k for k, step in enumerate(steps) if B in step) for f in (first, last))
        assert all(step == {B} for step in steps[begun : ended + 1])
        assert steps[ended + 1 :]


async def test_without_prompts_computed_ahead_a_full_pool_refuses_as_ever() -> None:
    async with running(num_pages=10) as bench:
        bench.engine.reserve(A, prompt_of(30, 1), spec(1), decodes=False)
        assert bench.engine.left() == (2, 31)
        with pytest.raises(PoolExhausted):
            bench.engine.reserve(B, prompt_of(25, 2), spec(2), decodes=False)


@pytest.mark.parametrize("moment", ["computing", "parked", "copying", "yielded", "promised", "returning", "loading"])
async def test_retired_at_any_moment_it_frees_everything_within_a_step(moment: str) -> None:
    bench: EngineBench
    async with running(num_pages=10, executor=InlineExecutor(0.002), prefill_chunk=4, stash_bytes=PLENTY) as bench:
        group_of = bench.engine._scheduler.groups.get
        ahead(bench, A, prompt_of(30, 1), spec(1))
        victim = A
        if moment == "computing":
            await until(lambda: group_of(A).computed > 4 and group_of(A).in_step)
        else:
            await parked(bench, A)
        if moment in ("copying", "yielded", "promised", "returning", "loading"):
            bench.engine.reserve(B, prompt_of(25, 2), spec(2), decodes=False)
            if moment == "promised":
                victim = B
            else:
                await until(lambda: group_of(A).gave_way)
        if moment in ("yielded", "returning", "loading"):
            await until(lambda: not group_of(A).in_step and group_of(B).trunk_pages)
        asking: list[asyncio.Task[Any]] = []
        if moment in ("returning", "loading"):
            asking.append(asyncio.get_running_loop().create_task(take(bench, A)))
            await until(lambda: group_of(A).claims)
        if moment == "loading":
            await bench.engine.retire(B)
            await until(lambda: group_of(A).loading)
        steps = bench.engine.stats.steps
        await bench.engine.retire(victim)
        assert bench.engine.stats.steps <= steps + 1
        assert bench.engine._capacity.pages.held_by(victim) == 0
        assert victim == B or bench.engine.stashed_bytes == 0
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(outcome, EngineError | Exception)
        for key in (A, B):
            await bench.engine.retire(key)
        assert bench.is_empty()
        assert bench.engine.stashed_bytes == 0


async def test_a_prompt_that_fails_ahead_is_told_to_the_listener() -> None:
    class Broken(Toy):
        def forward(self, batch: Any, state: Any, layer_done: Any = None) -> Any:
            raise RuntimeError("the device fell over")

    async with running(Broken()) as bench:
        ahead(bench, A, prompt_of(30, 1), spec(1))
        await bench.until(lambda: any(output.failed for output in bench.outputs))
        await bench.engine.retire(A)
        assert bench.is_empty()


@settings(max_examples=25)
@given(
    num_pages=st.integers(10, 24),
    stash_bytes=st.sampled_from([0, 3000, PLENTY]),
    attempts=st.integers(1, 3),
    prefill_chunk=st.sampled_from([3, 16]),
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30), st.integers(1, 2)), min_size=2, max_size=7),
)
def test_crowding_neither_blocks_nor_changes_anything(
    num_pages: int, stash_bytes: int, attempts: int, prefill_chunk: int, requests: list[tuple[int, int, int]]
) -> None:
    """Destinations come late and in any order; everybody gets through, and D goes on from what P hands out."""

    async def one(bench: EngineBench, number: int, length: int, late: int, n: int) -> None:
        key, prompt = TicketKey(number, 1), prompt_of(length, number)
        while True:
            try:
                ahead(bench, key, prompt, spec(number, n=n), attempts)
                break
            except PoolExhausted:
                await asyncio.sleep(0)
        for _ in range(late):
            await asyncio.sleep(0)
        chunks = await take(bench, key)
        await go_on(bench, key, chunks, prompt, n)
        await bench.engine.retire(key)
        assert bench.engine.stashed_bytes <= stash_bytes

    async def run() -> None:
        sizes = {"num_pages": num_pages, "prefill_chunk": prefill_chunk, "max_running": 4, "stash_bytes": stash_bytes}
        async with running(**sizes) as bench, asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            for number, request in enumerate(requests, 1):
                tasks.create_task(one(bench, number, *request))
        assert bench.is_empty()
        assert bench.engine.stashed_bytes == 0

    asyncio.run(run())
