"""How kernels are compiled and kept on disk. Needs no torch: sidecars compile too."""

import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

# Lets sums be vectorised. NaN and infinity keep their meaning: a bad value must reach the logits to be found.
OPTIONS: Any = {
    "nogil": True,
    "cache": True,
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
}

F = TypeVar("F", bound=Callable[..., Any])


def inlined(function: F) -> F:
    """A part of a compiled kernel; called by kernels only."""
    part: Any = numba.njit(**{**OPTIONS, "cache": False})(function)
    return part  # type: ignore[no-any-return]


def compiled_for_one_thread(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A kernel compiled at once (cached on disk) that runs on the calling thread, without the GIL. Many threads may
    call it at the same time. Its arguments are converted to what the signature says."""

    def decorate(function: Callable[..., Any]) -> Any:
        name = f"{function.__qualname__}_{digest_of(function.__module__)}"
        return numba.njit(signature, **OPTIONS)(renamed(function, name))

    return decorate


@functools.cache
def digest_of(module: str) -> str:
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


def renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function to the compiler, another one to the cache, which does not tell options apart."""
    copy = types.FunctionType(function.__code__, function.__globals__, name)
    copy.__annotations__, copy.__module__, copy.__qualname__ = function.__annotations__, function.__module__, name
    return copy
