"""Attention over pages, read in place, for any mix of single new tokens (decode) and several (prefill) in a step."""

import numpy as np
import torch

from kernels.cpu.arrays import Last
from kernels.cpu.attention_decode import decode
from kernels.cpu.attention_prefill import prefill
from kernels.cpu.kv_rows import as_rows
from kernels.reference import ReferenceOps

_tables, _starts, _lens = Last(), Last(), Last()


def paged_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    rows = as_rows(kv_layer, q.shape[2])
    if q.dtype != torch.float32 or rows is None:
        return ReferenceOps().paged_attention(q, kv_layer, block_tables, query_start, context_lens, scale)
    q = q.contiguous()
    out = np.empty(q.shape, np.float32)
    starts = _starts(query_start)
    arguments = (q.numpy(), rows, _tables(block_tables), starts, _lens(context_lens), np.float32(scale), out)
    num_threads = torch.get_num_threads()
    only_decodes = len(starts) - 1 == len(q)
    if only_decodes or (np.diff(starts) == 1).any():
        decode(*arguments, num_threads)
    if not only_decodes:
        prefill(*arguments, num_threads)
    return torch.from_numpy(out)
