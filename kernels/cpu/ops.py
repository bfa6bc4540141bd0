"""The ops on a CPU, in float32 as fast as memory allows; other dtypes take the reference's way.

Tensors must be plain (no autograd) and on the CPU. Compiled kernels are cached on disk, in `NUMBA_CACHE_DIR`
where set, else beside the source. Threads wait passively only where `OMP_WAIT_POLICY=passive` was set before
torch was imported, and `GOMP_SPINCOUNT` is not; else a step on a busy machine costs tens of milliseconds a kernel.
"""

import numpy as np
import torch

from kernels.cpu.activation import silu_mul
from kernels.cpu.attention import paged_attention
from kernels.cpu.gather import gather_units, scatter_units
from kernels.cpu.linear import linear
from kernels.cpu.norm import SERIAL_ROWS, add_rms_norm, rms_norm
from kernels.cpu.rotary import SERIAL_TOKENS, rotary_and_store
from kernels.cpu.sampling import pick, uniform
from kernels.cpu.vectors import has_vectors
from kernels.packing import FORMATS, pack
from kernels.reference import FP8_SCALE_BYTES


class CpuOps:
    linear = staticmethod(linear)
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    rotary_and_store = staticmethod(rotary_and_store)
    paged_attention = staticmethod(paged_attention)
    silu_mul = staticmethod(silu_mul)
    gather_units = staticmethod(gather_units)
    scatter_units = staticmethod(scatter_units)


KV_TYPES = {"float32": torch.float32, "float16": torch.float16, "fp8": torch.uint8}


def warm_up(kv_dtype: str = "float32") -> None:
    """Compiles every kernel for the types a model uses, or loads them from the cache. Seconds the first time; call it
    in the compute thread before the worker reports ready."""
    for num_tokens in (1, max(SERIAL_ROWS, SERIAL_TOKENS) + 1):
        _step(CpuOps(), num_tokens, KV_TYPES[kv_dtype])
    warm_up_sampling()


def warm_up_sampling() -> None:
    """The part of `warm_up` that a worker needs on any device: tokens are drawn on the CPU."""
    one = np.ones(1, np.uint64)
    for vocab_size in (4, 1 << 17):
        pick(torch.zeros(1, vocab_size), np.ones(1, np.float32), uniform(one, one, one))


def _step(ops: CpuOps, num_tokens: int, kv_type: torch.dtype) -> None:
    """One pass through every op, each token a sequence of its own, and attention once more as if it were two of one."""
    num_heads, num_kv_heads, head_dim = 2, 1, 8
    width = num_heads * head_dim
    x, norm_weight = torch.zeros(num_tokens, width), torch.ones(width)
    ops.rms_norm(x, norm_weight, 1e-5)
    ops.add_rms_norm(x, x, norm_weight, 1e-5)
    ops.linear(x, torch.zeros(4, width))
    for name in FORMATS if has_vectors() else ():
        ops.linear(x, pack(np.ones((4, width), np.float32), name))
    ops.silu_mul(x)
    kv = torch.zeros(num_tokens, num_kv_heads, head_dim)
    row = head_dim + FP8_SCALE_BYTES if kv_type == torch.uint8 else head_dim
    kv_layer = torch.zeros(num_tokens, 2, num_kv_heads, 4, row, dtype=kv_type)
    tables = torch.arange(num_tokens, dtype=torch.int32).unsqueeze(1)
    query_start = torch.arange(num_tokens + 1, dtype=torch.int32)
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    q = ops.rotary_and_store(
        x.view(num_tokens, num_heads, head_dim),
        kv,
        kv,
        torch.zeros(4, head_dim),
        positions,
        kv_layer,
        tables,
        query_start,
    )
    ops.paged_attention(q, kv_layer, tables, query_start, torch.ones(num_tokens, dtype=torch.int32), 1.0)
    pair = torch.tensor([0, 2], dtype=torch.int32)
    ops.paged_attention(torch.cat((q, q))[:2], kv_layer, tables[:1], pair, pair[1:], 1.0)
