"""Where steps are computed: a thread of their own, or (in the simulation, on virtual time) the event loop itself."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Executor(Protocol):
    async def run(self, work: Callable[[], T]) -> T:
        """Carries `work` out and returns its result or raises its exception. Returns (or raises) only when `work` has
        ended, also when the caller is cancelled: until then it uses memory."""

    def tell(self, call: Callable[[], None]) -> None:
        """From within `work`: makes `call` on the loop, before whoever waits in `run` goes on."""

    def close(self) -> None: ...


class ThreadExecutor:
    """One compute thread, the only one that runs torch. `num_threads`: torch's own threads within a step."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="compute",
            initializer=torch.set_num_threads,
            initargs=(num_threads,),
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """For what may be abandoned while it runs, because it uses nothing that anybody else would free."""
        return self._pool.submit(work)

    async def run(self, work: Callable[[], T]) -> T:
        self._loop = asyncio.get_running_loop()
        future = asyncio.wrap_future(self.submit(work))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()
            raise

    def tell(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call)  # and so is the end of `work`, later

    def close(self) -> None:
        self._pool.shutdown(wait=True)


_OF_A_GPU = ("AcceleratorError", "CUDARuntimeError", "CUDADriverError")
"""torch's, and CuPy's two."""
_PASSING = {1, 2, 9, 98, 209, 701}
"""Codes of CUDA errors that concern one call only: values, memory, sizes of launches, kernels that are not there."""


def device_is_lost(error: Exception) -> bool:
    """Whether a GPU's context is gone with this error, so that it answers every later call with the same one."""
    code = getattr(error, "error_code", getattr(error, "status", None))
    return type(error).__name__ in _OF_A_GPU and code not in _PASSING


class InlineExecutor:
    """Computes on the loop, deterministically; a step takes `step_s` of the loop's time. It computes at the end of that
    time, so that whatever is freed too early is seen to be."""

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s

    async def run(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(self._step_s)
        return work()

    def tell(self, call: Callable[[], None]) -> None:
        call()

    def close(self) -> None:
        pass
