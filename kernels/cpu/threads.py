"""How compiled kernels run: which threading layer, how many threads, and one at a time.

The OpenMP layer shares torch's libgomp (torch must be imported first), so both use one pool of threads and
one wait policy. Where it cannot load, numba falls back to other layers, of which `workqueue` crashes when two
threads enter at once; the lock makes each safe. A process has one compute thread, so the lock is free.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import torch

_config: Any = numba.config
_config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# Lets sums be vectorised. NaN and infinity keep their meaning: a bad value must reach the logits to be found.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

_lock = threading.Lock()
_launched = False

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """`function` compiled on first use (cached on disk), without the GIL, on as many threads as torch
    uses."""
    compile_parallel = numba.njit(parallel=True, nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")
    kernel: Any = compile_parallel(function)

    def call(*args: Any) -> None:
        num_threads = torch.get_num_threads()
        with _lock:
            if not _launched:
                _launch(num_threads)
            numba.set_num_threads(min(num_threads, _config.NUMBA_NUM_THREADS))
            kernel(*args)

    return call


def inlined(function: F) -> F:
    """A part of a compiled kernel; called by kernels only."""
    part: Any = numba.njit(nogil=True, fastmath=_FASTMATH, error_model="numpy")(function)
    return part  # type: ignore[no-any-return]


def _launch(num_threads: int) -> None:
    """Starting the layer resets OpenMP's thread count, which is also torch's: put it back."""
    global _launched
    numba.set_num_threads(1)
    torch.set_num_threads(num_threads)
    _launched = True
