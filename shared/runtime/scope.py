"""Parts of a coroutine that end early: at a deadline, or because somebody else says so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from shared.runtime.errors import DeadlineExceeded


@asynccontextmanager
async def until(deadline: float, what: str) -> AsyncIterator[None]:
    """The block must be done by `deadline` (time of the running loop), else DeadlineExceeded names `what`."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} was not done by the request's deadline") from error


class ScopeEnded(Exception):
    """Leaves the block of a scope that was ended while it could not be cancelled; swallowed at its end."""


class EndScope:
    """Like `asyncio.timeout`, but ended by a call instead of a time.

    `with scope:` runs until the block is done or `end()` is called, whichever is first; then the code after the
    block goes on. A cancellation that did not come from `end()` passes through untouched. For one `with` only.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._ended = False
        self._left = False
        self._cancelling = 0
        self._cancelled = False

    @property
    def ended(self) -> bool:
        return self._ended

    def end(self) -> None:
        """Ends the block at its current await. Idempotent; harmless before and after the block. Called from inside the
        block it only marks it: cancelling the running task would hit an await behind the block instead."""
        if self._ended:
            return
        self._ended = True
        if self._task is not None and not self._left and asyncio.current_task() is not self._task:
            self._cancelled = True
            self._task.cancel()

    def check(self) -> None:
        """Leaves the block if the scope was ended before it was entered, or by the block's own doing."""
        if self._ended:
            raise ScopeEnded

    def __enter__(self) -> "EndScope":
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("an EndScope needs a running task")
        self._cancelling = self._task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._left = True
        if kind is ScopeEnded:
            return True
        if not self._cancelled or self._task is None:
            return False
        return self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError
