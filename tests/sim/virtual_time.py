"""An event loop whose clock jumps to the next timer when nothing is ready: hours pass in milliseconds, and a run
repeats exactly. No sockets and no threads inside."""

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.SelectSelector):
    """Never sleeps; tells the loop how long it would have slept."""

    def __init__(self, loop: "VirtualLoop") -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen: every task waits for something that nobody will do")
        if timeout > 0:
            self._loop.advance(timeout)
        return []


class _NumberedTask(asyncio.Task[Any]):
    """Hashed by its number and not by its address: asyncio keeps tasks in sets, and their order must repeat."""

    __slots__ = ("_number",)

    def __init__(self, number: int, *args: Any, **kwargs: Any) -> None:
        self._number = number
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """after_turn: called after each turn of the loop, when all that was ready has run. What it raises ends the run."""

    def __init__(self, after_turn: Callable[[], None] | None = None) -> None:
        self._now = 0.0
        self.after_turn = after_turn
        super().__init__(_NoWaiting(self))
        numbers = itertools.count()
        self.set_task_factory(lambda loop, work, **kw: _NumberedTask(next(numbers), work, loop=loop, **kw))

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        if self.after_turn is not None:
            self.after_turn()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on a fresh loop with virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
