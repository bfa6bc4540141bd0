"""What processes hold in memory, and what one holds that has torch and the engine but no weights."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

_REPO = Path(__file__).parents[1]
_WITHOUT_WEIGHTS = """
import sys
import numba, torch
import kernels.cpu.ops, shared.engine.engine
torch.ones(64, 64) @ torch.ones(64, 64)
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """resident: all that is mapped and present. private: what nobody else maps. proportional: shared pages counted by
    their share."""

    resident_bytes: int
    private_bytes: int
    proportional_bytes: int


def memory_of(process: psutil.Process) -> Memory:
    found = process.memory_full_info()
    return Memory(found.rss, found.uss, found.pss)


def memory_by_name(processes: Mapping[str, psutil.Process]) -> dict[str, Memory]:
    return {name: memory_of(process) for name, process in processes.items()}


def torch_process_without_weights() -> Memory:
    """A process that imports torch, numba, the kernels and the engine, and multiplies two small matrices. Measure it
    while workers run, so that libraries are shared as they are for them."""
    argv = [sys.executable, "-c", _WITHOUT_WEIGHTS]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_REPO) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the process without weights did not start")
        memory = memory_of(psutil.Process(process.pid))
        process.communicate()
    return memory
