"""Random arguments for every op, as a model would make them: pages in any order, rows that nobody owns full of NaN."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.packing import BLOCK, PANEL, PackedWeight
from kernels.reference import as_kv_rows, encode_fp8

ACTIVATIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_KINDS = ACTIVATIONS | {"fp8": torch.uint8}


@dataclass(frozen=True, slots=True)
class Heads:
    """head_dim D, group: query heads of each of num_kv_heads."""

    head_dim: int
    group: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class Paged:
    """A step of several sequences over one layer of a pool."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    kv_layer: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor

    @property
    def rotary(self) -> tuple[torch.Tensor, ...]:
        """Arguments of rotary_and_store."""
        return (
            self.q, self.k, self.v, self.cos_sin, self.positions, self.kv_layer, self.block_tables, self.query_start
        )  # fmt: skip

    @property
    def attention(self) -> tuple[Any, ...]:
        """Arguments of paged_attention."""
        scale = float(self.q.shape[2] ** -0.5)
        return self.q, self.kv_layer, self.block_tables, self.query_start, self.context_lens, scale


def paged(
    lengths: list[tuple[int, int]],
    heads: Heads,
    page_tokens: int,
    kind: torch.dtype,
    kv_kind: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Paged:
    """lengths: (new tokens, context with them) of each sequence; (1, 0) is a row of padding."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-context // page_tokens) for _, context in lengths]
    order = torch.randperm(sum(counts) + 1, generator=random).tolist()
    tables = torch.full((len(lengths), max(counts) + 1), order.pop(), dtype=torch.int32)  # nobody's page
    num_pages = len(order) + 1
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    shape = (num_pages, 2, heads.num_kv_heads, page_tokens, heads.head_dim)
    kv = torch.full(shape, float("nan"))
    for row, (_, context) in zip(tables, lengths, strict=True):
        at = torch.arange(context)
        rows = torch.randn(context, 2, heads.num_kv_heads, heads.head_dim, generator=random)
        kv[row[at // page_tokens].long(), :, :, at % page_tokens] = rows
    num_tokens = sum(new for new, _ in lengths)
    width = heads.num_kv_heads * heads.head_dim
    fused = torch.randn(num_tokens, (heads.group + 2) * width, generator=random).to(device, kind)
    q, k, v = (x.view(num_tokens, -1, heads.head_dim) for x in fused.split([heads.group * width, width, width], dim=1))
    angles = torch.outer(torch.arange(max(c for _, c in lengths) + 1.0), 0.7 ** torch.arange(heads.head_dim / 2))
    positions = [at if context else -1 for new, context in lengths for at in range(context - new, context)]
    layer = kv.to(device)
    return Paged(
        q=q,
        k=k,
        v=v,
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1).to(device, kind),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        kv_layer=encode_fp8(layer) if kv_kind == torch.uint8 else layer.to(kv_kind),
        block_tables=tables.to(device),
        query_start=torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).to(device, torch.int32),
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
    )


def noise_pages(
    num_sequences: int, context: int, heads: Heads, page_tokens: int, kind: torch.dtype, kv_kind: torch.dtype,
    device: torch.device, new_tokens: int = 1,
) -> Paged:  # fmt: skip
    """Large and quick to make, for timing: every page full, pages in order."""
    pages = -(-context // page_tokens)
    shape = (num_sequences * pages, 2, heads.num_kv_heads, page_tokens, heads.head_dim)
    layer = torch.empty(shape, dtype=torch.float16, device=device).normal_()
    num_tokens = num_sequences * new_tokens
    q = torch.randn(num_tokens, heads.num_kv_heads * heads.group, heads.head_dim, device=device).to(kind)
    k = q[:, : heads.num_kv_heads].contiguous()
    numbers = torch.arange(num_sequences + 1, dtype=torch.int32, device=device)
    return Paged(
        q=q,
        k=k,
        v=k,
        cos_sin=torch.ones(context, heads.head_dim, device=device, dtype=kind),
        positions=torch.arange(context - new_tokens, context, device=device).repeat(num_sequences),
        kv_layer=as_kv_rows(layer, torch.empty(0, dtype=kv_kind, device=device)),
        block_tables=torch.arange(num_sequences * pages, dtype=torch.int32, device=device).view(num_sequences, pages),
        query_start=numbers * new_tokens,
        context_lens=torch.full((num_sequences,), context, dtype=torch.int32, device=device),
    )


def scattered_units(
    unit_bytes: int, device: torch.device, *, tiny: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of gather_units for 256 MiB, half of a pool's units in no order."""
    num_layers, total = 8, (1 << 20 if tiny else 1 << 28)
    chosen = total // (num_layers * unit_bytes)
    state = torch.zeros(num_layers, 2 * chosen, unit_bytes, dtype=torch.uint8, device=device)
    units = torch.randperm(2 * chosen, generator=torch.Generator().manual_seed(3))[:chosen].to(device)
    return state, units, torch.zeros(num_layers, chosen, unit_bytes, dtype=torch.uint8, device=device)


def packed_noise(format: str, num_out: int, width: int, seed: int = 0) -> PackedWeight:
    """A weight of random bits, without packing one. num_out: a multiple of PANEL, width of BLOCK."""
    random = np.random.default_rng(seed)
    num_panels = num_out // PANEL
    if format == "int8":
        panels = random.integers(-127, 128, (num_panels, width, PANEL), dtype=np.int8)
        scales = random.uniform(1e-3, 2e-3, (num_panels, PANEL)).astype(np.float32)
        return PackedWeight(format, num_out, width, panels, scales)
    if format == "float16":
        panels = random.standard_normal((num_panels, width, PANEL), dtype=np.float32).astype(np.float16)
        return PackedWeight(format, num_out, width, panels, np.empty((0, PANEL), np.float32))
    codes = random.integers(0, 256, (num_panels, width // BLOCK, PANEL * BLOCK // 2), dtype=np.uint8)
    steps = random.uniform(-2e-2, 2e-2, (num_panels, width // BLOCK, 2, PANEL)).astype(np.float16)
    return PackedWeight(format, num_out, width, codes, steps)
