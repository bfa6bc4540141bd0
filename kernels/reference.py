"""What each op computes, in plain torch and one sequence at a time: the oracle of the tests, and the
fall-back on any device."""

import torch

from kernels.packing import PackedWeight, unpack

FP8_MAX = 448.0
FP8_SCALE_BYTES = 4
FP8_SMALLEST = 1e-30
"""The largest of a row is taken for at least this, so that zeros stay zeros."""


class ReferenceOps:
    """Ops on whatever device their tensors are on; obvious, not fast. Pages, and what says where in them, may be on
    another device than the step and of another type."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, PackedWeight):
            weight = torch.from_numpy(unpack(weight)).to(x)
        return torch.nn.functional.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)
        return (x32 * scale).to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotary_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        kv_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
    ) -> torch.Tensor:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D / 2] each
        page_tokens, where = kv_layer.shape[3], kv_layer.device
        lengths = torch.diff(query_start.long()).to(where)
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=where), lengths)
        real = (positions >= 0).nonzero().flatten()  # the others are padding
        at, sequence = positions[real].to(where), sequence[real.to(where)]
        page, row = block_tables.to(where)[sequence, at // page_tokens].long(), at % page_tokens
        kv_layer[page, 0, :, row] = as_kv_rows(_rotate(k, cos, sin)[real], kv_layer)
        kv_layer[page, 1, :, row] = as_kv_rows(v[real], kv_layer)
        return _rotate(q, cos, sin)

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        starts, contexts = query_start.tolist(), context_lens.tolist()
        for s, context_len in enumerate(contexts):
            rows = slice(starts[s], starts[s + 1])
            if context_len == 0:
                out[rows] = 0
                continue
            key, value = gather_context(kv_layer, block_tables[s], context_len)
            out[rows] = _attend(q[rows], key.to(q), value.to(q), scale)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def gather_units(self, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
        buffer.copy_(state[:, units])

    def scatter_units(self, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
        state[:, units] = buffer


def gather_context(
    kv_layer: torch.Tensor, block_table: torch.Tensor, context_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's keys and values as copies, each [Hkv, context_len, D]; nothing beyond the context. fp8 becomes
    float32, other types stay."""
    page_tokens = kv_layer.shape[3]
    num_pages = -(-context_len // page_tokens)
    pages = kv_layer[block_table[:num_pages].to(kv_layer.device).long()]  # [n, 2, Hkv, B, D]
    merged = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context_len]  # [2, Hkv, context_len, row]
    if merged.dtype == torch.uint8:
        merged = decode_fp8(merged)
    return merged[0], merged[1]


def as_kv_rows(x: torch.Tensor, kv_layer: torch.Tensor) -> torch.Tensor:
    """x [..., D] as rows [..., row] of that layer."""
    return encode_fp8(x.to(kv_layer.device)) if kv_layer.dtype == torch.uint8 else x.to(kv_layer)


def encode_fp8(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] -> uint8 [..., D + 4]: the e4m3 codes of x over its row's scale, then that scale, a float32. The
    largest magnitude of a row gets the largest code."""
    x = x.float()
    top = x.abs().amax(dim=-1, keepdim=True)
    codes = (x * (FP8_MAX / top.clamp(min=FP8_SMALLEST))).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8), (top / FP8_MAX).view(torch.uint8)), dim=-1)


def decode_fp8(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [..., D + 4] -> float32 [..., D]."""
    codes, scale = rows[..., :-FP8_SCALE_BYTES], rows[..., -FP8_SCALE_BYTES:].contiguous()
    return codes.contiguous().view(torch.float8_e4m3fn).float() * scale.view(torch.float32)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attend(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """q [t, Hq, D] are the last t positions of key and value [Hkv, n, D]."""
    num_new, num_heads, _ = q.shape
    num_kv_heads, context_len, _ = key.shape
    key = key.repeat_interleave(num_heads // num_kv_heads, dim=0)
    value = value.repeat_interleave(num_heads // num_kv_heads, dim=0)
    scores = torch.einsum("thd,hnd->htn", q, key).float() * scale
    position = torch.arange(context_len - num_new, context_len, device=q.device).unsqueeze(1)
    future = torch.arange(context_len, device=q.device) > position  # [t, n]
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1).to(q.dtype)
    return torch.einsum("htn,hnd->thd", weights, value)
