"""State that lives where links cannot reach it: it comes and goes through host memory, and nothing is lost on the way.
The device of these tests is a second place in the CPU's memory, which links see as little as a GPU's."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared.engine.pool import StatePool
from shared.engine.staged_pool import StagedPool
from shared.protocol.messages import SamplingSpec
from shared.state.layout import PoolLayout
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, deliver, first_tokens, running, undivided

KEY, OTHER = TicketKey(1, 1), TicketKey(2, 1)
PLENTY = 1 << 20


def staged(layout: PoolLayout) -> StatePool:
    return StagedPool(layout, torch.device("cpu"))


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((k * 7 + salt * 31 + k * k) % 251 for k in range(length))


def spec(n: int = 1, max_tokens: int = 12) -> SamplingSpec:
    return SamplingSpec(seed=3, n=n, max_tokens=max_tokens, ignore_eos=True)


async def go_on(p: EngineBench, d: EngineBench, chunks: Any, prompt: tuple[int, ...], n: int) -> None:
    """D has its reservation already; it generates what one worker alone would."""
    deliver(p, d, KEY, chunks)
    d.engine.start_prefilled(KEY, first_tokens(chunks))
    await d.finish(KEY, n)
    mine = [[first.token, *d.text_of(KEY, first.choice)] for first in first_tokens(chunks)]
    assert mine == undivided(prompt, spec(n))
    await d.engine.retire(KEY)


@pytest.mark.parametrize(("p_pool", "d_pool"), [(staged, staged), (staged, StatePool), (StatePool, staged)])
@pytest.mark.parametrize(("length", "n"), [(1, 1), (11, 3), (16, 2), (37, 1)])
async def test_a_prompt_is_handed_over(
    p_pool: Callable[[PoolLayout], StatePool], d_pool: Callable[[PoolLayout], StatePool], length: int, n: int
) -> None:
    prompt = prompt_of(length)
    async with running(make_pool=p_pool, prefill_chunk=6) as p, running(make_pool=d_pool) as d:
        d.engine.reserve(OTHER, prompt_of(9), spec(), decodes=True)  # so that the two sides' numbers differ
        d.engine.reserve(KEY, prompt, spec(n), decodes=True)
        chunks = await p.prefill(KEY, prompt, spec(n))
        await go_on(p, d, chunks, prompt, n)
        await d.engine.retire(OTHER)
        await p.engine.retire(KEY)
        assert p.is_empty()
        assert d.is_empty()


async def test_each_chunk_is_there_when_it_is_told() -> None:
    prompt = prompt_of(24)
    async with running(make_pool=staged, prefill_chunk=8) as p:
        p.engine.reserve(KEY, prompt, spec(), decodes=False)
        at = 0
        async for chunk in p.engine.prefill(KEY):
            pages = [unit for piece in chunk.pieces if piece.component == 0 for unit in piece.units]
            history = torch.from_numpy(p.pool.layout.view(p.pool.buffer, 0))
            assert torch.equal(history[:, pages], p.pool.tensors[0][:, pages])
            assert bool(history[:, pages].any(dim=-1).all())
            at += len(pages)
        assert at == 6
        await p.engine.retire(KEY)


async def test_a_prompt_that_gave_way_leaves_from_its_new_pages() -> None:
    """It was computed ahead, went to the stash, and came back where others had been."""
    prompt, others = prompt_of(30), prompt_of(25, 2)
    async with running(make_pool=staged, num_pages=10, stash_bytes=PLENTY) as p, running(make_pool=staged) as d:
        p.engine.reserve(KEY, prompt, spec(2), decodes=False)
        p.engine.compute_ahead(KEY, 1)
        await p.until(lambda: any(KEY in output.parked for output in p.outputs))
        await p.prefill(OTHER, others, spec())
        assert any(KEY in output.preempted for output in p.outputs)
        await p.engine.retire(OTHER)
        async with asyncio.timeout(10):
            chunks = [chunk async for chunk in p.engine.prefill(KEY)]
        assert p.engine.stats.preemptions_stashed == 1
        d.engine.reserve(KEY, prompt, spec(2), decodes=True)
        await go_on(p, d, chunks, prompt, 2)
        await p.engine.retire(KEY)


async def test_what_arrived_survives_that_its_group_gives_way() -> None:
    prompt, sampling = prompt_of(11, 2), spec(3, max_tokens=30)
    async with (
        running(make_pool=staged) as p,
        running(make_pool=staged, num_pages=32, growth_tokens=4, stash_bytes=PLENTY) as d,
    ):
        d.engine.reserve(OTHER, prompt_of(13, 1), spec(max_tokens=110), decodes=True)
        d.engine.start_local(OTHER)
        d.engine.reserve(KEY, prompt, sampling, decodes=True)
        chunks = await p.prefill(KEY, prompt, sampling)
        deliver(p, d, KEY, chunks)
        d.engine.start_prefilled(KEY, first_tokens(chunks))
        await d.until(lambda: any(KEY in output.preempted for output in d.outputs))
        await d.finish(OTHER)
        await d.engine.retire(OTHER)
        await d.finish(KEY, 3)
        assert d.engine.stats.preemptions_recomputed == 0
        assert [d.text_of(KEY, c) for c in range(3)] == [tokens[1:] for tokens in undivided(prompt, sampling)]
        await d.engine.retire(KEY)


async def test_what_is_computed_and_used_here_takes_no_host_memory() -> None:
    async with running(make_pool=staged) as bench:
        prompt = prompt_of(20)
        assert await bench.local(KEY, prompt, spec()) == undivided(prompt, spec())
        assert not any(bench.pool.buffer)
