"""From an op to its kernel: the source as one text, and what a launch needs.

The ops know no CuPy: a `Launcher` carries their launches out, on a GPU (cupy_launcher.py) or, in the tests, on a CPU.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

Argument = torch.Tensor | int | float | None
"""A tensor goes as its address, None as a null pointer, an int as 32 bits, a float as float32."""

_HERE = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)

_TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "Bfloat", torch.uint8: "Code"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One instance: `expression` is its name as C++ has it, template arguments and all, in `source`.cu."""

    source: str
    expression: str


class Launcher(Protocol):
    num_processors: int
    """How many blocks run at the same time if each fills a multiprocessor."""

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], num_threads: int, *arguments: Argument) -> None:
        """Queues the kernel on torch's current stream, compiling it first if need be; never waits for it."""


@cache
def source_text(name: str) -> str:
    """name.cu with its includes put in, each once: compilers get one text, and caches keyed by it see every change."""
    seen: set[str] = set()

    def include(match: re.Match[str]) -> str:
        header = match.group(1)
        if header in seen:
            return ""
        seen.add(header)
        return _INCLUDE.sub(include, (_HERE / header).read_text(encoding="utf-8"))

    return _INCLUDE.sub(include, (_HERE / f"{name}.cu").read_text(encoding="utf-8"))


def instance(source: str, name: str, *parameters: torch.dtype | int) -> Kernel:
    """The kernel `name` of source.cu for these template arguments; types by their tensors' dtype, fp8 rows as uint8."""
    written = ", ".join(str(p) if isinstance(p, int) else _TYPES[p] for p in parameters)
    return Kernel(source, f"{name}<{written}>")


def is_float(*tensors: torch.Tensor) -> bool:
    """Whether all are of one float type that kernels take as activations."""
    kind = tensors[0].dtype
    return kind in _TYPES and kind != torch.uint8 and all(x.dtype == kind for x in tensors)


def flat(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous and aligned to four of its elements; itself where it is."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % (4 * x.element_size()) else x
