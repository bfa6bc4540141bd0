"""What is kept of keys and values: rotated, written to their pages, in each type, and read for what it is."""

import pytest
import torch
from hypothesis import given

from kernels.cpu.ops import KV_TYPES, warm_up
from kernels.reference import decode_fp8, encode_fp8
from tests.support_kernels import CPU, REFERENCE, few, shapes
from tests.support_paged import POISON, make_paged

kinds = pytest.mark.parametrize("kv_dtype", KV_TYPES)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    for kv_dtype in KV_TYPES:
        warm_up(kv_dtype)


@kinds
@few
@given(**shapes)
def test_rotary_and_store(
    kv_dtype: str,
    lengths: list[tuple[int, int]],
    page_tokens: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    seed: int,
) -> None:
    batch = make_paged(lengths, page_tokens, num_kv_heads, group, head_dim, seed, kv_dtype)
    angles = torch.outer(torch.arange(128.0), 1e4 ** -torch.linspace(0, 1, head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    pools = []
    for ops in (CPU, REFERENCE):
        pool = batch.kv_layer.clone()
        rotated = ops.rotary_and_store(
            batch.q, batch.k, batch.v, cos_sin, batch.positions, pool, batch.block_tables, batch.query_start
        )
        pools.append((rotated, pool))
    assert pools[0][0].is_contiguous()
    torch.testing.assert_close(pools[0][0], pools[1][0], rtol=1e-6, atol=1e-6)
    # Equal where the reference wrote, and the poison untouched everywhere else.
    ours, theirs = (decode_fp8(pool) if kv_dtype == "fp8" else pool for _, pool in pools)
    # A value next to a border of two codes may fall to either side: half a step of the type, at most.
    step = {"float32": 1e-6, "float16": 1e-3, "fp8": 0.13}[kv_dtype]
    torch.testing.assert_close(ours, theirs, rtol=step, atol=1e-6, equal_nan=True)
    if kv_dtype != "float32":
        close = torch.isclose(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert (~close).float().mean() < 0.002, "borders are rare"


def test_rotation_is_half_split() -> None:
    batch = make_paged([(1, 1)], page_tokens=1, num_kv_heads=1, group=1, head_dim=8)
    batch.q[0, 0] = torch.tensor([1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0])
    cos_sin = torch.tensor([[0.5, 0.25, 1.0, 1.0, 2.0, 4.0, 0.0, 0.0]])
    expected = torch.tensor([1 * 0.5 - 3 * 2, 2 * 0.25 - 4 * 4, 0, 0, 3 * 0.5 + 1 * 2, 4 * 0.25 + 2 * 4, 0, 0])
    for ops in (CPU, REFERENCE):
        rotated = ops.rotary_and_store(
            batch.q,
            batch.k,
            batch.v,
            cos_sin,
            batch.positions,
            batch.kv_layer,
            batch.block_tables,
            batch.query_start,
        )
        torch.testing.assert_close(rotated[0, 0], expected)
        torch.testing.assert_close(batch.kv_layer[batch.block_tables[0, 0], 1, 0, 0], batch.v[0, 0])


def test_fp8_keeps_a_row_within_its_steps() -> None:
    rows = torch.randn(500, 64) * torch.logspace(-6, 6, 500).unsqueeze(1)
    rows[7] = 0
    kept = decode_fp8(encode_fp8(rows))
    top = rows.abs().amax(dim=1, keepdim=True)
    assert encode_fp8(rows).shape == (500, 68)
    assert torch.equal(kept[7], rows[7])
    # Three bits of mantissa; below 2^-6 of the largest code's 448 the steps are equal.
    assert ((kept - rows).abs() <= torch.maximum(rows.abs() / 16, top * 2**-10 / 448) * 1.0001).all()
    assert (kept.abs().amax(dim=1) / top.squeeze(1))[torch.arange(500) != 7].sub(1).abs().max() < 1e-6


@kinds
def test_what_is_no_number_stays_none_when_it_is_kept(kv_dtype: str) -> None:
    batch = make_paged([(1, 5), (1, 3)], page_tokens=4, num_kv_heads=1, group=1, head_dim=16, kv_dtype=kv_dtype)
    batch.k[0, 0, 3] = POISON
    cos_sin = torch.cat((torch.ones(8, 8), torch.zeros(8, 8)), dim=1)
    tables = (batch.block_tables, batch.query_start)
    q = CPU.rotary_and_store(batch.q, batch.k, batch.v, cos_sin, batch.positions, batch.kv_layer, *tables)
    found = CPU.paged_attention(q, batch.kv_layer, *tables, batch.context_lens, batch.scale)
    assert torch.isnan(found[0]).all()
    assert torch.isfinite(found[1]).all()


def test_every_fp8_code_is_read_for_what_it_is() -> None:
    """One row of values a code, each the whole answer of its own query."""
    codes = torch.tensor([code for code in range(256) if code not in (0x7F, 0xFF)], dtype=torch.uint8)
    rows = torch.cat((codes.unsqueeze(1).expand(-1, 8), torch.full((len(codes), 1), 0.37).view(torch.uint8)), dim=1)
    kv_layer = encode_fp8(torch.zeros(len(codes), 2, 1, 1, 8))
    kv_layer[:, 1, 0, 0] = rows
    tables = torch.arange(len(codes), dtype=torch.int32).unsqueeze(1)
    starts, ones = torch.arange(len(codes) + 1, dtype=torch.int32), torch.ones(len(codes), dtype=torch.int32)
    found = CPU.paged_attention(torch.ones(len(codes), 1, 8), kv_layer, tables, starts, ones, 1.0)
    torch.testing.assert_close(found[:, 0], decode_fp8(rows), rtol=1e-6, atol=0)
