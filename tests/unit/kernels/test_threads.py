"""Kernels and threads: who calls, how many compute, and what torch is left with."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import torch

from kernels.cpu import compiling, threads
from kernels.cpu.ops import CpuOps
from kernels.ops import get_ops
from tests.support_kernels import CPU, REFERENCE
from tests.support_paged import attend, make_paged


def test_threads_may_call_at_once_and_torch_keeps_its_thread_count() -> None:
    batch = make_paged([(1, 300), (1, 90), (4, 30)], page_tokens=16, num_kv_heads=3, group=3, head_dim=64)
    x, weight = torch.randn(6, 96), torch.randn(40, 96)
    expected = attend(REFERENCE, batch)
    failures: list[str] = []

    def work() -> None:
        before = torch.get_num_threads()
        for _ in range(50):
            if not torch.allclose(attend(CPU, batch), expected, atol=1e-5):
                failures.append("attention")
            if not torch.allclose(CPU.linear(x, weight), x @ weight.T, atol=1e-4):
                failures.append("linear")
        if torch.get_num_threads() != before:
            failures.append("thread count")

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


AT_ONCE = """
import threading, numba, torch
from kernels.cpu.ops import CpuOps
x, weight = torch.ones(6, 96), torch.ones(400, 96)
def work():
    for _ in range(200):
        CpuOps().linear(x, weight)
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(numba.threading_layer())
"""


def test_threads_may_call_at_once_where_the_layer_itself_does_not_allow_it() -> None:
    """numba's own layer ends the process when two threads enter it."""
    env = os.environ | {"NUMBA_THREADING_LAYER": "workqueue"}
    done = subprocess.run([sys.executable, "-c", AT_ONCE], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "workqueue\n"), done.stderr


def test_the_first_kernel_leaves_torch_its_thread_count() -> None:
    program = """
import torch
torch.set_num_threads(1)
from kernels.cpu.ops import CpuOps
CpuOps().linear(torch.ones(2, 16), torch.ones(4, 16))
print(torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["1"]


WHOLE = """
import numpy as np
from kernels.cpu.part import add
from kernels.cpu.threads import compiled

@compiled
def whole(out):
    out[0] = add(out[0])

found = np.zeros(1)
whole.serial(found)
print(found[0])
"""


def test_a_kernel_is_compiled_anew_when_a_part_of_it_changes_elsewhere(tmp_path: Path) -> None:
    package = tmp_path / "kernels" / "cpu"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    for module in (threads, compiling):
        shutil.copy(str(module.__file__), package)
    (package / "whole.py").write_text(WHOLE)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}

    def run(added: int) -> str:
        part = f"from kernels.cpu.threads import inlined\n\n@inlined\ndef add(x):\n    return x + {added}\n"
        (package / "part.py").write_text(part)
        argv = [sys.executable, "-m", "kernels.cpu.whole"]
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert [run(1), run(2)] == ["1.0\n", "2.0\n"]


def test_get_ops_knows_the_cpu() -> None:
    assert isinstance(get_ops("cpu"), CpuOps)
