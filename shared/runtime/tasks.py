"""Who owns the tasks of a process: started in one place, ended in one place, and no failure lost."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from shared.runtime.errors import BatonError

log = logging.getLogger(__name__)
T = TypeVar("T")
Work = Coroutine[Any, Any, T]


class TaskOwner:
    """Owns tasks from `spawn` until they end; leaving the context cancels what is left and waits for it.

    A task of `spawn` belongs to one request: its failure is logged and counted in `on_failure` and ends nothing else.
    A task of `spawn_vital` belongs to the process: its failure cancels everything and leaves the context as an error.
    """

    def __init__(self, on_failure: Callable[[str], None] | None = None) -> None:
        self._group = asyncio.TaskGroup()
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawned: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Work[object], name: str) -> asyncio.Task[None]:
        task = self._add(self._contained(coroutine, name), coroutine, name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    def spawn_vital(self, coroutine: Work[object], name: str) -> asyncio.Task[None]:
        return self._add(_finish(coroutine), coroutine, name)

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    async def wait_spawned(self, timeout_s: float) -> None:
        """Until the tasks of requests, and what they spawn meanwhile, have ended, or the time is over."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._spawned and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(set(self._spawned), timeout=left)

    def cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel_all()
        await self._group.__aexit__(kind, error, trace)

    def _add(self, wrapped: Work[None], work: Work[object], name: str) -> asyncio.Task[None]:
        try:
            task = self._group.create_task(wrapped, name=name)
        except RuntimeError:
            wrapped.close()
            work.close()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it was never begun
        return task

    async def _contained(self, work: Work[object], name: str) -> None:
        try:
            await work
        except Exception as error:
            expected = isinstance(error, BatonError)
            log.error("%s failed: %s", name, str(error) or type(error).__name__, exc_info=None if expected else error)
            if self._on_failure is not None:
                self._on_failure(name)


async def _finish(work: Work[object]) -> None:
    await work
