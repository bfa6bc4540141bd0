"""Prompts that an engine computes before anybody takes their chunks, for the tests of what becomes of them."""

import asyncio
from typing import Any

from shared.engine.api import ChunkDone
from shared.protocol.messages import SamplingSpec
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


def watch_rows(bench: EngineBench) -> list[set[TicketKey]]:
    steps: list[set[TicketKey]] = []
    execute = bench.engine._runner.execute

    def watched(plan: Any, watch: Any) -> Any:
        steps.append({row.key for row in plan.rows})
        return execute(plan, watch)

    bench.engine._runner.execute = watched  # type: ignore[method-assign]
    return steps


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)
