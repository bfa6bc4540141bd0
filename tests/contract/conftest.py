"""Waiting for what must come true, without guessing how long it takes; and the store's drivers, one after another."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from shared.store.driver import BlockDriver
from tests.contract.store_drivers import BEDS, Bed

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def eventually() -> Eventually:
    """`await eventually(condition)` returns once it holds and fails after 60 seconds."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    return wait


@pytest.fixture(params=BEDS)
async def bed(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bed]:
    async with BEDS[request.param](tmp_path) as bed:
        yield bed


@pytest.fixture
async def driver(bed: Bed) -> AsyncIterator[BlockDriver]:
    driver = bed.driver()
    await driver.open()
    yield driver
    await driver.close()
