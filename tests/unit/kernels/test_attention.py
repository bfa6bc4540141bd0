"""Attention over pages against the reference, over shapes, page sizes and mixed batches. Rows that must not be read are
NaN."""

import pytest
import torch
from hypothesis import given

from kernels.cpu.ops import KV_TYPES, warm_up
from tests.support_kernels import CPU, REFERENCE, few, shapes
from tests.support_paged import POISON, attend, make_paged

kinds = pytest.mark.parametrize("kv_dtype", KV_TYPES)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    for kv_dtype in KV_TYPES:
        warm_up(kv_dtype)


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


@kinds
@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim", "page_tokens"),
    [(1, 1, 80, 16), (2, 200, 64, 16), (1, 193, 96, 5), (8, 4, 128, 64), (3, 5, 256, 48), (1, 16, 8, 300)],
)
def test_many_query_heads_wide_heads_and_large_pages(
    num_kv_heads: int, group: int, head_dim: int, page_tokens: int, kv_dtype: str
) -> None:
    """A block of prefill may hold one token; pages may be longer than a span, or end in the middle of one."""
    lengths = [(1, 1), (1, 511), (2, 2), (193, 400), (1, 256), (5, 261)]
    batch = make_paged(lengths, page_tokens, num_kv_heads, group, head_dim, kv_dtype=kv_dtype)
    torch.testing.assert_close(attend(CPU, batch), attend(REFERENCE, batch), rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    batch = make_paged([(1, 900), (1, 900), (7, 40)], page_tokens=16, num_kv_heads=1, group=3, head_dim=64)
    batch.q.mul_(3000.0)
    actual = attend(CPU, batch)
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, attend(REFERENCE, batch), rtol=1e-3, atol=1e-3)


def test_scores_far_below_zero_leave_nothing_to_what_is_not_there() -> None:
    """Vectors and tiles are filled up beyond the context, and rows look no further than themselves."""
    batch = make_paged([(1, 5), (1, 257), (7, 13), (3, 100)], page_tokens=16, num_kv_heads=2, group=2, head_dim=16)
    batch.kv_layer[:, 0] = 1 + batch.kv_layer[:, 0] / 100
    batch.q.fill_(-50.0)
    torch.testing.assert_close(attend(CPU, batch), attend(REFERENCE, batch), rtol=1e-3, atol=1e-3)


MIXED = [(1, 700), (1, 20), (9, 30), (1, 44), (150, 300)]


@kinds
@pytest.mark.parametrize("lengths", [MIXED, [(1, 700)] * 18 + [(1, 20)], [(1, 9000)] * 4 + [(1, 20)]])
def test_a_sequence_does_not_depend_on_the_batch(kv_dtype: str, lengths: list[tuple[int, int]]) -> None:
    """Few are merged by one thread, many sequences and many parts by all of them."""
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


@pytest.mark.parametrize(("head_dim", "kind"), [(16, torch.bfloat16), (12, torch.float32)])
def test_other_types_and_head_dims_take_the_reference_way(head_dim: int, kind: torch.dtype) -> None:
    batch = make_paged([(1, 20), (5, 9)], page_tokens=16, num_kv_heads=1, group=3, head_dim=head_dim)
    pages = batch.kv_layer.to(kind)
    arguments = (batch.block_tables, batch.query_start, batch.context_lens, batch.scale)
    torch.testing.assert_close(
        CPU.paged_attention(batch.q, pages, *arguments), REFERENCE.paged_attention(batch.q, pages, *arguments)
    )
