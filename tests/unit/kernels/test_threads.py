"""Kernels and threads: who calls, how many compute, and what torch is left with."""

import subprocess
import sys
import threading

import torch

from kernels.cpu.ops import CpuOps
from kernels.ops import get_ops
from kernels.reference import ReferenceOps
from tests.support_kernels import CPU, REFERENCE, attend, make_paged


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

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


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


def test_get_ops_picks_by_device() -> None:
    assert isinstance(get_ops("cpu"), CpuOps)
    assert isinstance(get_ops("cuda"), ReferenceOps)
