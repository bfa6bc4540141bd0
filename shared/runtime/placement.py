"""Where a process runs and how far it steps back for others: niceness, cores, NUMA node."""

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1
_NICEST = 19
_MASK_BITS = 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placement:
    """niceness: of the threads that step back, added to that of the process. cores: None: all that it has. node: its
    memory comes from there while there is any."""

    niceness: int = 0
    cores: frozenset[int] | None = None
    node: int | None = None

    @classmethod
    def of(cls, niceness: int, cores: str, node: int | None) -> Self:
        """Out of settings; ValueError, in words for people, where this machine has no such place."""
        chosen = _parsed(cores) if cores else None
        allowed = os.sched_getaffinity(0)
        if chosen is not None and (missing := chosen - allowed):
            raise ValueError(f"cores: {_listed(missing)} are not ours to use; there are {_listed(allowed)}")
        if node is not None:
            of_node = _cores_of(node)
            chosen = of_node & (allowed if chosen is None else chosen)
            if not chosen:
                raise ValueError(f"numa_node: node {node} has the cores {_listed(of_node)}, and none of them is ours")
        return cls(niceness, chosen, node)

    def apply(self) -> None:
        """Cores and memory, to the threads that are there (libraries start some) and to those that come later; the
        memory to this thread and those that it starts. OSError where the system refuses."""
        if self.cores is not None:
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setaffinity(int(thread), self.cores)
        if self.node is not None:
            _prefer_memory_of(self.node)

    def step_back(self) -> None:
        """This thread does, once, and all that it starts. There is no way back."""
        own = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, own) + self.niceness
        os.setpriority(os.PRIO_PROCESS, own, min(_NICEST, niceness))

    def call_stepped_back(self, work: Callable[[], T]) -> T:
        """Its result; the threads that it starts step back, and the caller does not."""
        with ThreadPoolExecutor(1, initializer=self.step_back) as thread:
            return thread.submit(work).result()


def _parsed(text: str) -> frozenset[int]:
    """The cores of a list such as 0,4-7."""
    advice = "write them as in 0,4-7"
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 20:
            raise ValueError(f"cores: {part.strip()!r} is no core and no range of cores; {advice}")
        low, high = int(first), int(last or first)
        if high < low or high >= _MASK_BITS:
            raise ValueError(f"cores: {part.strip()!r} is no range of cores; {advice}")
        found.update(range(low, high + 1))
    return frozenset(found)


def _cores_of(node: int) -> frozenset[int]:
    try:
        return _parsed((_NODES / f"node{node}" / "cpulist").read_text().strip())
    except (OSError, ValueError):
        there = sorted(path.name.removeprefix("node") for path in _NODES.glob("node[0-9]*"))
        raise ValueError(
            f"numa_node: there is no node {node} with cores; there are {', '.join(there) or 'none'}"
        ) from None


def _listed(cores: set[int] | frozenset[int]) -> str:
    return ",".join(str(core) for core in sorted(cores)) or "none"


def _prefer_memory_of(node: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"memory of a NUMA node cannot be asked for on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_ulong * (_MASK_BITS // 64))()
    words[node // 64] = 1 << (node % 64)
    if libc.syscall(number, _PREFERRED, ctypes.byref(words), ctypes.c_ulong(_MASK_BITS + 1)):
        code = ctypes.get_errno()
        raise OSError(code, f"memory of NUMA node {node} was refused ({os.strerror(code)})")
