"""Transfers without a pause, beside which something else is measured."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_GIB = 1 << 30


@dataclass
class Meter:
    """What a storm moved, and for how long it lasted."""

    began_at: float = field(default_factory=time.perf_counter)
    ended_at: float = 0.0
    num_bytes: int = 0

    def rate(self) -> float:
        """GiB/s, once it is over."""
        return self.num_bytes / _GIB / (self.ended_at - self.began_at)


@asynccontextmanager
async def storm(transfer: Callable[[int], Awaitable[int]], streams: int) -> AsyncIterator[Meter]:
    """`streams` transfers at once while the block lasts; the last ones are waited for, and count. transfer(number) says
    how many bytes it moved; no two have the same number."""
    meter, is_over, numbers = Meter(), asyncio.Event(), itertools.count()

    async def stream() -> None:
        while not is_over.is_set():
            meter.num_bytes += await transfer(next(numbers))

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())
        try:
            yield meter
        finally:
            is_over.set()
    meter.ended_at = time.perf_counter()
