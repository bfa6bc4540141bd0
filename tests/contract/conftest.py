"""Waiting for what must come true, without guessing how long it takes."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def eventually() -> Eventually:
    """`await eventually(condition)` returns once it holds and fails after 60 seconds."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    return wait
