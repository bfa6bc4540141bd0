"""How compiled kernels run: which threading layer, how many threads, and one at a time.

The OpenMP layer comes first: in the container images it is torch's own libgomp, so both use one pool of threads;
elsewhere numba may load the system's beside it, which is a second pool that waits alike. Where OpenMP
cannot load, numba falls back to other layers, of which `workqueue` crashes when two threads enter at once; the lock
makes each safe. A process has one compute thread, so the lock is free.
"""

import threading
from collections.abc import Callable
from typing import Any

import numba
import torch

from kernels.cpu.compiling import OPTIONS, digest_of, renamed
from kernels.cpu.compiling import inlined as inlined

_config: Any = numba.config
_config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

_lock = threading.Lock()
_of_this_thread = threading.local()


class Compiled:
    """A kernel compiled on first use (cached on disk) that runs without the GIL, on as many threads as torch uses."""

    def __init__(self, function: Callable[..., None], *, exact: bool = False) -> None:
        options = OPTIONS | {"fastmath": False} if exact else OPTIONS
        name = f"{function.__qualname__}_{digest_of(function.__module__)}"
        self._parallel: Any = numba.njit(parallel=True, **options)(renamed(function, name))
        self._serial: Any = numba.njit(**options)(renamed(function, f"{name}_serial"))

    def __call__(self, *arguments: Any) -> None:
        num_threads = torch.get_num_threads()
        with _lock:
            if num_threads != getattr(_of_this_thread, "num_threads", 0):
                _use_threads(num_threads)
            self._parallel(*arguments)

    def serial(self, *arguments: Any) -> None:
        """On the calling thread alone: waking others costs more than a small kernel."""
        self._serial(*arguments)


def compiled(function: Callable[..., None]) -> Compiled:
    return Compiled(function)


def compiled_exactly(function: Callable[..., None]) -> Compiled:
    """Every operation rounds on its own and in its place: the same bits on every machine."""
    return Compiled(function, exact=True)


def _use_threads(num_threads: int) -> None:
    """For the calling thread. Starting the layer resets OpenMP's thread count, which is also torch's: put it back."""
    numba.set_num_threads(min(num_threads, _config.NUMBA_NUM_THREADS))
    torch.set_num_threads(num_threads)
    _of_this_thread.num_threads = num_threads
