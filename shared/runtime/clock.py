"""Time, passed in: flows never read a wall clock, so that a simulation can run them on virtual time."""

import asyncio
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic seconds and waiting. Deadlines are absolute inside a process and `remaining_s` on the wire."""

    def now(self) -> float: ...

    async def sleep(self, delay_s: float) -> None: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer: ...


class LoopClock:
    """The running event loop's own clock; a loop with virtual time makes it virtual."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(max(0.0, delay_s))

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_at(when, callback)
