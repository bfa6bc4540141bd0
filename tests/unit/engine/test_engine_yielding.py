"""Prompts that are computed before anybody takes their chunks yield to everybody, and lose nothing by it."""

import asyncio
from typing import Any

import pytest

from shared.engine.api import ChunkDone
from shared.engine.executor import InlineExecutor
from shared.engine.models.toy import Toy
from shared.runtime.errors import PoolExhausted
from shared.runtime.overlap import Cut
from tests.support_ahead import PLENTY, A, B, C, ahead, go_on, parked, prompt_of, spec, take, told, until
from tests.support_engine import EngineBench, running


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
        await until(lambda: bool(asking))
        chunks = await asking[0]
        assert told_at[0] is False
        await go_on(bench, A, chunks, prompt_of(30, 1), 1)


async def test_what_comes_back_in_the_step_that_goes_on_with_it_is_told_once() -> None:
    """First what comes back, whole, when it is there, and then the rest by layers."""
    async with running(num_pages=10, prefill_chunk=4, stash_bytes=PLENTY) as bench:
        ahead(bench, A, prompt_of(30, 1), spec(1), attempts=1)
        while not bench.engine._scheduler.groups[A].computed:
            await asyncio.sleep(0)
        bench.engine.reserve(B, prompt_of(25, 2), spec(2), decodes=False)
        await take(bench, B)
        group = bench.engine._scheduler.groups[A]
        assert group.saved is not None
        (before,) = [place.computed for place in group.saved.places]
        assert 0 < before < 30
        await bench.engine.retire(B)
        steps = bench.engine.stats.steps
        async with asyncio.timeout(10):
            chunks = [chunk async for chunk in bench.engine.prefill(A, Cut(layers=1))]
        assert bench.engine.stats.steps - steps == -(-(30 - before) // 4), "a step of its own brought it back"
        assert (chunks[0].start, chunks[0].end, chunks[0].partial) == (0, before, False)
        assert all(chunk.start >= before for chunk in chunks[1:])
        assert any(chunk.partial for chunk in chunks)
        cells = [
            (piece.component, layer, piece.first_unit + k)
            for chunk in chunks
            for piece in chunk.pieces
            for layer in piece.layers(bench.pool.layout.components[piece.component].num_layers)
            for k in range(len(piece.units))
            if piece.component == 0
        ]
        assert len(cells) == len(set(cells)), "it is sent twice"
        await go_on(bench, A, chunks, prompt_of(30, 1), 1)
        await bench.engine.retire(A)
        assert bench.is_empty()


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
