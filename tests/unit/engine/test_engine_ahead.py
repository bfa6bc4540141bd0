"""Prompts that are computed before anybody takes their chunks: they yield to everybody, and lose nothing by it."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.api import ChunkDone
from shared.engine.executor import InlineExecutor
from shared.engine.models.toy import Toy
from shared.protocol.messages import SamplingSpec
from shared.runtime.errors import EngineError, PoolExhausted
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, deliver, first_tokens, running, undivided

A, B, C = TicketKey(1, 1), TicketKey(2, 1), TicketKey(3, 1)
PLENTY = 1 << 20


def prompt_of(length: int, salt: int) -> tuple[int, ...]:
    return tuple((k * 5 + salt * 17) % 251 for k in range(length))


def spec(salt: int, **sampling: Any) -> SamplingSpec:
    return SamplingSpec(**({"seed": salt, "max_tokens": 8, "ignore_eos": True} | sampling))


def ahead(
    bench: EngineBench, key: TicketKey, prompt: tuple[int, ...], sampling: SamplingSpec, attempts: int = 1
) -> None:
    bench.engine.reserve(key, prompt, sampling, decodes=False)
    bench.engine.compute_ahead(key, attempts)


async def take(bench: EngineBench, key: TicketKey) -> list[ChunkDone]:
    async with asyncio.timeout(10):
        return [chunk async for chunk in bench.engine.prefill(key)]


async def parked(bench: EngineBench, *keys: TicketKey) -> None:
    await bench.until(lambda: all(any(key in output.parked for output in bench.outputs) for key in keys))


def told(bench: EngineBench, key: TicketKey) -> list[str]:
    """What the listener heard of it, in order."""
    kinds = ("preempted", "resumed", "parked")
    return [kind for output in bench.outputs for kind in kinds if key in getattr(output, kind)]


async def go_on(p: EngineBench, key: TicketKey, chunks: list[ChunkDone], prompt: tuple[int, ...], n: int) -> None:
    """D takes over what P hands out, and generates what one worker alone would: every byte was right."""
    sampling = spec(key.room, n=n)
    async with running(num_pages=64) as d:
        d.engine.reserve(key, prompt, sampling, decodes=True)
        deliver(p, d, key, chunks)
        d.engine.start_prefilled(key, first_tokens(chunks))
        await d.finish(key, n)
        mine = [[first.token, *d.text_of(key, first.choice)] for first in first_tokens(chunks)]
        assert mine == undivided(prompt, sampling)
        await d.engine.retire(key)


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


@pytest.mark.parametrize("stash_bytes", [0, PLENTY], ids=["recompute", "stash"])
async def test_a_parked_prompt_yields_to_a_new_one_and_comes_back_when_asked(stash_bytes: int) -> None:
    first, second = prompt_of(30, 1), prompt_of(25, 2)
    async with running(num_pages=10, stash_bytes=stash_bytes) as bench:
        ahead(bench, A, first, spec(1))
        await parked(bench, A)
        assert bench.engine.left()[0] == 10
        bench.engine.reserve(B, second, spec(2), decodes=False)
        assert bench.engine.left()[0] == 10 - 7  # promised to B
        chunks = await take(bench, B)
        assert told(bench, A) == ["parked", "preempted"]
        assert (bench.engine.stashed_bytes > 0) is bool(stash_bytes)
        assert bench.engine.queues()["yielded"] == 1
        stats = bench.engine.stats
        assert (stats.preemptions_stashed, stats.preemptions_recomputed) == ((1, 0) if stash_bytes else (0, 1))
        asking = asyncio.get_running_loop().create_task(take(bench, A))
        await asyncio.sleep(0.01)
        assert not asking.done()  # B is asked for and keeps its pages
        await go_on(bench, B, chunks, second, 1)
        await bench.engine.retire(B)
        chunks = await asking
        assert stats.prompt_tokens_computed == 25 + (30 if stash_bytes else 60)
        assert stats.tokens_dropped == (0 if stash_bytes else 30)
        assert told(bench, A) == ["parked", "preempted", "resumed"]
        await go_on(bench, A, chunks, first, 1)
        await bench.engine.retire(A)
        assert bench.is_empty()
        assert bench.engine.stashed_bytes == 0


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


def watch_rows(bench: EngineBench) -> list[set[TicketKey]]:
    steps: list[set[TicketKey]] = []
    execute = bench.engine._runner.execute

    def watched(plan: Any) -> Any:
        steps.append({row.key for row in plan.rows})
        return execute(plan)

    bench.engine._runner.execute = watched  # type: ignore[method-assign]
    return steps


async def test_one_that_is_asked_for_drives_out_others_between_their_chunks() -> None:
    """A is away and is asked for: C, half computed, yields at once and not when it is complete."""
    async with running(num_pages=12, prefill_chunk=4, stash_bytes=PLENTY) as bench:
        ahead(bench, A, prompt_of(40, 1), spec(1))
        await parked(bench, A)
        ahead(bench, B, prompt_of(16, 2), spec(2))
        await parked(bench, B)
        assert told(bench, A) == ["parked", "preempted"]
        ahead(bench, C, prompt_of(32, 3), spec(3))
        while not bench.engine._scheduler.groups[C].computed:
            await asyncio.sleep(0)
        await take(bench, A)
        assert told(bench, C) == ["preempted"]
        assert told(bench, B) == ["parked", "preempted"]
        assert bench.engine.stats.tokens_dropped == 0
        await bench.engine.retire(A)
        for key, length in ((B, 16), (C, 32)):
            chunks = await take(bench, key)
            await go_on(bench, key, chunks, prompt_of(length, key.room), 1)
            await bench.engine.retire(key)
        assert bench.engine.stats.prompt_tokens_computed == 40 + 16 + 32
        assert bench.is_empty()
        assert bench.engine.stashed_bytes == 0


async def test_asked_while_it_is_being_loaded_it_hands_nothing_out_before_that_is_done() -> None:
    """The pieces name pages whose bytes are not there yet."""
    bench: EngineBench
    told_at: list[bool] = []
    asking: list[asyncio.Task[list[ChunkDone]]] = []

    async def ask() -> list[ChunkDone]:
        chunks = []
        async for chunk in bench.engine.prefill(A):
            told_at.append(bench.engine._scheduler.groups[A].loading)
            chunks.append(chunk)
        return chunks

    class AskWhileLoading(InlineExecutor):
        async def run(self, work: Any) -> Any:
            group = bench.engine._scheduler.groups.get(A)
            if group is not None and group.loading and not asking:
                asking.append(asyncio.get_running_loop().create_task(ask()))
                for _ in range(20):
                    await asyncio.sleep(0)
                assert told_at == []
            return await super().run(work)

    async with running(Toy(), AskWhileLoading(), num_pages=10, prefill_chunk=4, stash_bytes=PLENTY) as bench:
        ahead(bench, A, prompt_of(30, 1), spec(1), attempts=2)
        while not bench.engine._scheduler.groups[A].computed:
            await asyncio.sleep(0)
        bench.engine.reserve(B, prompt_of(25, 2), spec(2), decodes=False)
        await take(bench, B)
        await bench.engine.retire(B)
        await _until(lambda: bool(asking))
        chunks = await asking[0]
        assert told_at[0] is False
        await go_on(bench, A, chunks, prompt_of(30, 1), 1)


async def test_those_somebody_waits_for_come_before_new_ones() -> None:
    async with running(num_pages=10, executor=InlineExecutor(0.005), stash_bytes=PLENTY) as bench:
        ahead(bench, A, prompt_of(30, 1), spec(1))
        await parked(bench, A)
        bench.engine.reserve(B, prompt_of(30, 2), spec(2), decodes=False)
        bench.engine.compute_ahead(B, 1)
        await parked(bench, B)  # A is away
        bench.engine.reserve(C, prompt_of(30, 3), spec(3), decodes=False)  # B is to give way to it
        asking = asyncio.get_running_loop().create_task(take(bench, A))
        await asyncio.sleep(0)
        chunks = await asking
        assert bench.engine.queues()["waiting"] == 1  # C still is
        await go_on(bench, A, chunks, prompt_of(30, 1), 1)
        await bench.engine.retire(A)
        await go_on(bench, C, await take(bench, C), prompt_of(30, 3), 1)


@pytest.mark.parametrize("attempts", [1, 2])
async def test_a_new_attempt_is_begun_while_pages_are_free_and_any_are_left(attempts: int) -> None:
    async with running(num_pages=10, prefill_chunk=4, stash_bytes=PLENTY) as bench:
        ahead(bench, A, prompt_of(30, 1), spec(1), attempts)
        while not bench.engine._scheduler.groups[A].computed:
            await asyncio.sleep(0)
        bench.engine.reserve(B, prompt_of(25, 2), spec(2), decodes=False)
        await take(bench, B)
        assert told(bench, A) == ["preempted"]
        await bench.engine.retire(B)
        if attempts > 1:
            await parked(bench, A)
            assert told(bench, A) == ["preempted", "resumed", "parked"]
        else:
            for _ in range(100):
                await asyncio.sleep(0)
            assert told(bench, A) == ["preempted"]
            assert bench.engine.pages()[1] == 10
        await go_on(bench, A, await take(bench, A), prompt_of(30, 1), 1)
        assert bench.engine.stats.prompt_tokens_computed == 25 + 30


async def test_what_is_promised_to_one_is_not_given_to_another() -> None:
    async with running(num_pages=10, executor=InlineExecutor(0.005)) as bench:
        ahead(bench, A, prompt_of(30, 1), spec(1))
        await parked(bench, A)
        bench.engine.reserve(B, prompt_of(25, 2), spec(2), decodes=False)
        with pytest.raises(PoolExhausted):
            bench.engine.reserve(C, prompt_of(25, 3), spec(3), decodes=False)
        bench.engine.reserve(C, prompt_of(12, 3), spec(3), decodes=False)
        await asyncio.gather(take(bench, B), take(bench, C))


async def test_one_that_waited_for_pages_takes_them_once() -> None:
    """Also where so many are free by then that it could have them twice."""
    async with running(num_pages=10, stash_bytes=PLENTY) as bench:
        ahead(bench, A, prompt_of(30, 1), spec(1))
        await parked(bench, A)
        ahead(bench, B, prompt_of(9, 2), spec(2))
        await parked(bench, B)
        assert told(bench, A) == ["parked", "preempted"]
        assert bench.engine.pages() == (10, 10 - 3, 0)
        assert bench.engine.slots()[1] == bench.engine.slots()[0] - 1


async def test_nobody_yields_once_it_is_asked_for() -> None:
    async with running(num_pages=10) as bench:
        ahead(bench, A, prompt_of(30, 1), spec(1))
        await parked(bench, A)
        await take(bench, A)
        with pytest.raises(PoolExhausted):
            bench.engine.reserve(B, prompt_of(25, 2), spec(2), decodes=False)
        bench.engine.reserve(B, prompt_of(5, 2), spec(2), decodes=False)


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
            await _until(lambda: group_of(A).computed > 4 and group_of(A).in_step)
        else:
            await parked(bench, A)
        if moment in ("copying", "yielded", "promised", "returning", "loading"):
            bench.engine.reserve(B, prompt_of(25, 2), spec(2), decodes=False)
            if moment == "promised":
                victim = B
            else:
                await _until(lambda: group_of(A).gave_way)
        if moment in ("yielded", "returning", "loading"):
            await _until(lambda: not group_of(A).in_step and group_of(B).trunk_pages)
        asking: list[asyncio.Task[Any]] = []
        if moment in ("returning", "loading"):
            asking.append(asyncio.get_running_loop().create_task(take(bench, A)))
            await _until(lambda: group_of(A).claims)
        if moment == "loading":
            await bench.engine.retire(B)
            await _until(lambda: group_of(A).loading)
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


async def _until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_prompt_that_fails_ahead_is_told_to_the_listener() -> None:
    class Broken(Toy):
        def forward(self, batch: Any, state: Any) -> Any:
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
