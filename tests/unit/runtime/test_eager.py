"""What is begun at once ends at once, or goes on in a task as if it had never been begun elsewhere."""

import asyncio

import pytest

from shared.runtime.eager import begin
from shared.runtime.tasks import TaskOwner


async def test_what_waits_for_nothing_is_over_when_begin_returns() -> None:
    seen = []

    async def work() -> None:
        async with asyncio.Lock():
            seen.append("done")

    assert begin(work()) is None
    assert seen == ["done"]


async def test_the_rest_gets_results_and_errors_where_it_waits() -> None:
    loop = asyncio.get_running_loop()
    first, second, third = (loop.create_future() for _ in range(3))
    seen: list[object] = []

    async def work() -> str:
        seen.append(await first)
        try:
            await second
        except ValueError as error:
            seen.append(error)
        await asyncio.sleep(0)
        seen.append(await third)
        return "end"

    rest = begin(work())
    assert rest is not None
    task = asyncio.ensure_future(rest)  # noqa: TID251
    failure = ValueError("no")
    first.set_result(1)
    loop.call_soon(second.set_exception, failure)
    loop.call_later(0.01, third.set_result, 3)
    assert await task == "end"
    assert seen == [1, failure, 3]


async def test_an_error_before_the_first_wait_is_raised_at_once_and_one_after_it_in_the_task() -> None:
    async def work(*, early: bool) -> None:
        if early:
            raise ValueError("early")
        await asyncio.sleep(0)
        raise ValueError("late")

    with pytest.raises(ValueError, match="early"):
        begin(work(early=True))
    rest = begin(work(early=False))
    assert rest is not None
    with pytest.raises(ValueError, match="late"):
        await rest


async def test_the_rest_is_cancelled_where_it_waits() -> None:
    cancelled, never = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await never.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with TaskOwner() as tasks:
        rest = begin(work())
        assert rest is not None
        tasks.spawn(rest, "work")
        await asyncio.sleep(0)
    assert cancelled.is_set()
