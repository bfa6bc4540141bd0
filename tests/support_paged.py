"""Batches over a paged pool for the tests of attention, on any implementation."""

from dataclasses import dataclass

import torch

from kernels.cuda.ops import KV_TYPES
from kernels.ops import Ops
from kernels.reference import as_kv_rows, encode_fp8

POISON = float("nan")


@dataclass(frozen=True)
class Paged:
    """A batch over a pool of which only the rows in use hold numbers."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    kv_layer: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)


def empty_pages(shape: tuple[int, ...], head_dim: int, kind: torch.dtype) -> torch.Tensor:
    rows = torch.full((*shape, head_dim), POISON)
    return encode_fp8(rows) if kind == torch.uint8 else rows.to(kind)


def make_paged(
    lengths: list[tuple[int, int]],
    page_tokens: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    seed: int = 0,
    kv_dtype: str = "float32",
) -> Paged:
    """lengths: (new tokens, context with them) of each sequence. Rows that no sequence has are NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // page_tokens) for _, context in lengths]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    kv_layer = empty_pages((num_pages, 2, num_kv_heads, page_tokens), head_dim, KV_TYPES[kv_dtype])
    positions: list[int] = []
    for s, (new, context) in enumerate(lengths):
        pages = torch.tensor([order.pop() for _ in range(counts[s])])
        tables[s] = order[0]  # the padding names a foreign page, all NaN
        tables[s, : counts[s]] = pages
        past = torch.arange(context)
        rows = torch.randn(context, 2, num_kv_heads, head_dim, generator=generator)
        kv_layer[pages[past // page_tokens], :, :, past % page_tokens] = as_kv_rows(rows, kv_layer)
        positions += range(context - new, context)
    total = sum(new for new, _ in lengths)
    # Slices of one projection, as a model makes them.
    fused = torch.randn(total, (group + 2) * num_kv_heads * head_dim, generator=generator)
    q, k, v = torch.split(fused, [group * num_kv_heads * head_dim, *[num_kv_heads * head_dim] * 2], dim=1)
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).to(torch.int32)
    return Paged(
        q=q.view(total, -1, head_dim),
        k=k.view(total, -1, head_dim),
        v=v.view(total, -1, head_dim),
        positions=torch.tensor(positions, dtype=torch.int64),
        kv_layer=kv_layer,
        block_tables=tables,
        query_start=starts,
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
    )


def attend(ops: Ops, p: Paged) -> torch.Tensor:
    return ops.paged_attention(p.q, p.kv_layer, p.block_tables, p.query_start, p.context_lens, p.scale)
