"""The ops on a CPU, in float32 as fast as memory allows; other dtypes take the reference's way.

Tensors must be plain (no autograd) and on the CPU. Compiled kernels are cached on disk, in `NUMBA_CACHE_DIR`
where set, else beside the source. Threads wait passively only where `OMP_WAIT_POLICY=passive` was set before
torch was imported; without it a step on a busy machine costs tens of milliseconds a kernel.
"""

import torch

from kernels.cpu.activation import silu_mul
from kernels.cpu.attention import paged_attention
from kernels.cpu.linear import linear
from kernels.cpu.norm import add_rms_norm, rms_norm
from kernels.cpu.rotary import rotary_and_store


class CpuOps:
    linear = staticmethod(linear)
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    rotary_and_store = staticmethod(rotary_and_store)
    paged_attention = staticmethod(paged_attention)
    silu_mul = staticmethod(silu_mul)


def warm_up() -> None:
    """Compiles every kernel for the types a model uses, or loads them from the cache. Seconds the first time;
    call it in the compute thread before the worker reports ready."""
    ops = CpuOps()
    num_heads, num_kv_heads, head_dim = 2, 1, 8
    x = torch.zeros(2, num_heads * head_dim)
    weight = torch.ones(num_heads * head_dim)
    ops.rms_norm(x, weight, 1e-5)
    ops.add_rms_norm(x, x, weight, 1e-5)
    ops.linear(x, torch.zeros(4, num_heads * head_dim))
    ops.silu_mul(x)
    kv_layer = torch.zeros(2, 2, num_kv_heads, 4, head_dim)
    tables = torch.tensor([[0], [1]], dtype=torch.int32)
    query_start = torch.tensor([0, 1, 2], dtype=torch.int32)
    q = ops.rotary_and_store(
        x.view(2, num_heads, head_dim),
        torch.zeros(2, num_kv_heads, head_dim),
        torch.zeros(2, num_kv_heads, head_dim),
        torch.zeros(4, head_dim),
        torch.zeros(2, dtype=torch.int64),
        kv_layer,
        tables,
        query_start,
    )
    ops.paged_attention(q, kv_layer, tables, query_start, torch.ones(2, dtype=torch.int32), 1.0)
