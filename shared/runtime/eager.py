"""A coroutine that is begun at once: most of a small transfer's time would go into waking a task for it."""

import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def begin(work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T] | None:
    """Runs `work` up to its first wait. None: it is over, and what it raised was raised here; else what is left of it,
    for a task to run. Until then it belongs to no task: it must not use what asks for the current one, as
    asyncio.timeout does. Its result is lost where it does not wait."""
    try:
        waiting = work.send(None)
    except StopIteration:
        return None
    return _rest(work, waiting)


async def _rest(work: Coroutine[Any, Any, T], waiting: Any) -> T:
    return await _carry_on(work, waiting)


@types.coroutine
def _carry_on(work: Coroutine[Any, Any, T], waiting: Any) -> Generator[Any, Any, T]:
    try:
        while True:
            try:
                result = yield waiting
            except BaseException as error:
                waiting = work.throw(error)
            else:
                waiting = work.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
