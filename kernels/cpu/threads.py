"""How compiled kernels run: which threading layer, how many threads, and one at a time.

The OpenMP layer comes first: in the container images it is torch's own libgomp, so both use one pool of threads;
elsewhere numba may load the system's beside it, which is a second pool that waits alike. Where OpenMP
cannot load, numba falls back to other layers, of which `workqueue` crashes when two threads enter at once; the lock
makes each safe. A process has one compute thread, so the lock is free.
"""

import functools
import hashlib
import re
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import torch

_config: Any = numba.config
_config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# Lets sums be vectorised. NaN and infinity keep their meaning: a bad value must reach the logits to be found.
_OPTIONS: Any = {
    "nogil": True,
    "cache": True,
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
}

_lock = threading.Lock()
_of_this_thread = threading.local()

F = TypeVar("F", bound=Callable[..., Any])


class Compiled:
    """A kernel compiled on first use (cached on disk) that runs without the GIL, on as many threads as torch uses."""

    def __init__(self, function: Callable[..., None], *, exact: bool = False) -> None:
        options = _OPTIONS | {"fastmath": False} if exact else _OPTIONS
        name = f"{function.__qualname__}_{_digest_of(function.__module__)}"
        self._parallel: Any = numba.njit(parallel=True, **options)(_renamed(function, name))
        self._serial: Any = numba.njit(**options)(_renamed(function, f"{name}_serial"))

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


def inlined(function: F) -> F:
    """A part of a compiled kernel; called by kernels only."""
    part: Any = numba.njit(**{**_OPTIONS, "cache": False})(function)
    return part  # type: ignore[no-any-return]


@functools.cache
def _digest_of(module: str) -> str:
    """Of what a module's kernels are made of: itself and all of ours that it imports. numba's cache looks at a kernel's
    own file only, and would go on with old code where an `inlined` part or a constant elsewhere has changed."""
    sources: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in sources or name not in sys.modules:
            continue
        sources[name] = source = Path(str(sys.modules[name].__file__)).read_text(encoding="utf-8")
        for package, names in re.findall(r"^from (kernels[.\w]*) import ([^(\n]*)", source, re.MULTILINE):
            waiting += [package, *(f"{package}.{part.strip()}" for part in names.split(","))]
    return hashlib.sha256("\0".join(sources[name] for name in sorted(sources)).encode()).hexdigest()[:8]


def _renamed(function: Callable[..., None], name: str) -> Callable[..., None]:
    """The same function to the compiler, another one to the cache, which does not tell options apart."""
    copy = types.FunctionType(function.__code__, function.__globals__, name)
    copy.__annotations__, copy.__module__, copy.__qualname__ = function.__annotations__, function.__module__, name
    return copy


def _use_threads(num_threads: int) -> None:
    """For the calling thread. Starting the layer resets OpenMP's thread count, which is also torch's: put it back."""
    numba.set_num_threads(min(num_threads, _config.NUMBA_NUM_THREADS))
    torch.set_num_threads(num_threads)
    _of_this_thread.num_threads = num_threads
