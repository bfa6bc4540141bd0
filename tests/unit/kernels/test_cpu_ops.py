"""Every CPU op against the reference, over shapes, page sizes and mixed batches. Rows that must not be read
are NaN."""

import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.ops import KV_TYPES, CpuOps, warm_up
from kernels.ops import Ops, get_ops
from kernels.reference import ReferenceOps, decode_fp8, encode_fp8
from tests.support_paged import POISON, attend, make_paged

CPU: Ops = CpuOps()
REFERENCE: Ops = ReferenceOps()

few = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    for kv_dtype in KV_TYPES:
        warm_up(kv_dtype)


kinds = pytest.mark.parametrize("kv_dtype", KV_TYPES)
decode_row = st.integers(1, 90).map(lambda context: (1, context))
prefill_row = st.tuples(st.integers(2, 40), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))
batches = st.lists(st.one_of(decode_row, prefill_row), min_size=1, max_size=5)
shapes = {
    "lengths": batches,
    "page_tokens": st.integers(1, 32),
    "num_kv_heads": st.integers(1, 3),
    "group": st.integers(1, 8),
    "head_dim": st.integers(1, 16).map(lambda eighths: 8 * eighths),
    "seed": st.integers(0, 1000),
}


@kinds
@few
@given(**shapes)
def test_paged_attention(
    kv_dtype: str,
    lengths: list[tuple[int, int]],
    page_tokens: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    seed: int,
) -> None:
    batch = make_paged(lengths, page_tokens, num_kv_heads, group, head_dim, seed, kv_dtype)
    actual = attend(CPU, batch)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, attend(REFERENCE, batch), rtol=1e-5, atol=1e-5)


def test_reference_attention_is_softmax_over_the_context() -> None:
    batch = make_paged([(2, 5)], page_tokens=2, num_kv_heads=1, group=1, head_dim=4)
    rows = torch.stack(
        [batch.kv_layer[batch.block_tables[0, p // 2], :, 0, p % 2] for p in range(5)], dim=1
    )  # [2, 5, D]
    for i, visible in ((0, 4), (1, 5)):
        weights = torch.softmax(rows[0, :visible] @ batch.q[i, 0] * batch.scale, dim=0)
        torch.testing.assert_close(attend(REFERENCE, batch)[i, 0], weights @ rows[1, :visible])


@kinds
@pytest.mark.parametrize("context", [255, 256, 257, 512, 3000, 8192])
def test_long_contexts_cross_spans_and_tiles(context: int, kv_dtype: str) -> None:
    lengths = [(1, context), (1, 3), (70, context), (1, 97)]
    batch = make_paged(lengths, page_tokens=16, num_kv_heads=3, group=3, head_dim=64, kv_dtype=kv_dtype)
    torch.testing.assert_close(attend(CPU, batch), attend(REFERENCE, batch), rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    batch = make_paged([(1, 900), (1, 900), (7, 40)], page_tokens=16, num_kv_heads=1, group=3, head_dim=64)
    batch.q.mul_(3000.0)
    actual = attend(CPU, batch)
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, attend(REFERENCE, batch), rtol=1e-3, atol=1e-3)


@kinds
def test_a_sequence_does_not_depend_on_the_batch(kv_dtype: str) -> None:
    lengths = [(1, 700), (1, 20), (9, 30), (1, 44), (150, 300)]
    batch = make_paged(lengths, page_tokens=16, num_kv_heads=3, group=3, head_dim=64, kv_dtype=kv_dtype)
    together = attend(CPU, batch)
    for s, (new, _) in enumerate(lengths):
        rows = slice(int(batch.query_start[s]), int(batch.query_start[s + 1]))
        alone = CPU.paged_attention(
            batch.q[rows],
            batch.kv_layer,
            batch.block_tables[s : s + 1],
            torch.tensor([0, new], dtype=torch.int32),
            batch.context_lens[s : s + 1],
            batch.scale,
        )
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_share_the_work_and_change_nothing(num_threads: int) -> None:
    batch = make_paged([(1, 700), (400, 410), (1, 20)], page_tokens=16, num_kv_heads=3, group=3, head_dim=64)
    before, expected = torch.get_num_threads(), attend(CPU, batch)
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(attend(CPU, batch), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("new", [1, 5])
def test_a_nan_query_stays_nan_and_in_its_row(new: int) -> None:
    batch = make_paged([(new, 40), (1, 40)], page_tokens=16, num_kv_heads=1, group=1, head_dim=16)
    batch.q[0] = POISON
    actual = attend(CPU, batch)
    assert torch.isnan(actual[0]).all()
    assert torch.isfinite(actual[1:]).all()


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("position", [0, 5, 295])
def test_a_nan_in_the_context_reaches_the_result(position: int, side: int, new: int) -> None:
    batch = make_paged([(new, 300)], page_tokens=16, num_kv_heads=1, group=1, head_dim=16)
    batch.kv_layer[batch.block_tables[0, position // 16], side, 0, position % 16] = POISON
    assert torch.isnan(attend(CPU, batch)).all()


def test_a_key_that_is_nan_spoils_nobody_before_it() -> None:
    batch = make_paged([(8, 100)], page_tokens=16, num_kv_heads=1, group=2, head_dim=16)
    batch.kv_layer[batch.block_tables[0, 6], 0, 0, 97 % 16] = POISON
    spoiled = torch.isnan(attend(CPU, batch)).flatten(1).all(dim=1)
    assert spoiled.tolist() == [False] * 5 + [True] * 3


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


@few
@given(
    rows=st.integers(1, 50),
    width=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear(rows: int, width: int, outputs: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width + 2, generator=generator)[:, 2:]
    weight = torch.randn(outputs, width, generator=generator)
    offset = torch.randn(outputs, generator=generator) if bias else None
    actual = CPU.linear(x, weight, offset)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, REFERENCE.linear(x, weight, offset), rtol=1e-5, atol=1e-4)


def test_linear_rows_do_not_mix() -> None:
    x, weight = torch.randn(9, 64), torch.randn(33, 64)
    quiet = CPU.linear(x, weight)
    x[4] = POISON
    loud = CPU.linear(x, weight)
    assert torch.isnan(loud[4]).all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(loud[others], quiet[others])


@few
@given(rows=st.integers(1, 70), width=st.sampled_from([1, 7, 64, 576]), seed=st.integers(0, 99))
def test_norms_and_activation(rows: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, width, generator=generator)
    weight = torch.randn(width, generator=generator)
    gate_up = torch.randn(rows, 2 * width, generator=generator)
    torch.testing.assert_close(CPU.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(CPU.silu_mul(gate_up), REFERENCE.silu_mul(gate_up), rtol=1e-5, atol=1e-6)
    normed, total = CPU.add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_total = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed, expected_normed, rtol=1e-5, atol=1e-6)
    assert torch.equal(total, expected_total)


@pytest.mark.parametrize(("head_dim", "kind"), [(16, torch.bfloat16), (12, torch.float32)])
def test_other_types_and_head_dims_take_the_reference_way(head_dim: int, kind: torch.dtype) -> None:
    batch = make_paged([(1, 20), (5, 9)], page_tokens=16, num_kv_heads=1, group=3, head_dim=head_dim)
    pages = batch.kv_layer.to(kind)
    arguments = (batch.block_tables, batch.query_start, batch.context_lens, batch.scale)
    torch.testing.assert_close(
        CPU.paged_attention(batch.q, pages, *arguments), REFERENCE.paged_attention(batch.q, pages, *arguments)
    )


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


def test_get_ops_knows_the_cpu() -> None:
    assert isinstance(get_ops("cpu"), CpuOps)
