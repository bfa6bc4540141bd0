"""Ending a part of a coroutine from outside, without ever swallowing anybody else's cancellation."""

import asyncio

import pytest

from shared.runtime.scope import EndScope


async def test_end_leaves_the_block_and_the_code_behind_it_runs() -> None:
    scope = EndScope()
    trace: list[str] = []

    async def flow() -> None:
        with scope:
            trace.append("in")
            await asyncio.Event().wait()
            trace.append("never")
        await asyncio.sleep(0)
        trace.append("after")

    async with asyncio.TaskGroup() as group:
        group.create_task(flow())
        await asyncio.sleep(0)
        scope.end()
    assert trace == ["in", "after"]


async def test_a_cancellation_from_elsewhere_passes_through() -> None:
    scope = EndScope()

    async def flow() -> None:
        with scope:
            await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(flow())
    await asyncio.sleep(0)
    scope.end()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_end_from_inside_or_before_is_seen_by_check_and_hits_nothing_behind_the_block() -> None:
    for ended_before in (True, False):
        scope = EndScope()
        if ended_before:
            scope.end()
        reached = False
        with scope:
            if not ended_before:
                scope.end()
            scope.check()
            reached = True
        await asyncio.sleep(0)
        assert not reached


async def test_an_end_after_the_block_is_harmless() -> None:
    scope = EndScope()
    with scope:
        await asyncio.sleep(0)
    scope.end()
    await asyncio.sleep(0)
    assert scope.ended


async def test_errors_of_the_block_are_not_swallowed() -> None:
    scope = EndScope()

    def block() -> None:
        with scope:
            scope.end()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        block()
