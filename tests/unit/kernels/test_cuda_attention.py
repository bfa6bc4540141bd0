"""The GPU's attention and rotary kernels, compiled for a CPU, against the reference. Rows that must not be read are
NaN, and threads and blocks run in either order."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cuda.attention import num_splits
from kernels.cuda.ops import KV_TYPES, CudaOps
from kernels.ops import Ops
from kernels.reference import ReferenceOps, decode_fp8, encode_fp8
from tests.support_cuda import ATTENTION, KV_PAIRS, EmulatedLauncher
from tests.support_paged import POISON, Paged, attend, make_paged

REFERENCE: Ops = ReferenceOps()
NAMES = {kind: name for name, kind in KV_TYPES.items()}
MANY_PROCESSORS = 1000

few = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
numbers = pytest.mark.parametrize(
    ("x_type", "kv_type", "head_dim", "group"),
    ATTENTION,
    ids=[f"{str(x)[6:]}-{NAMES[kv]}-{head_dim}-{group}" for x, kv, head_dim, group in ATTENTION],
)
decode_row = st.sampled_from([1, 5, 16, 63, 64, 65, 128, 130, 200]).map(lambda context: (1, context))
prefill_row = st.tuples(st.integers(2, 40), st.integers(0, 70)).map(lambda pair: (pair[0], pair[0] + pair[1]))

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def in_type(batch: Paged, kind: torch.dtype) -> Paged:
    return replace(batch, q=batch.q.to(kind), k=batch.k.to(kind), v=batch.v.to(kind))


def check_attention(launcher: EmulatedLauncher, batch: Paged) -> torch.Tensor:
    actual = attend(CudaOps(launcher), batch)
    assert actual.is_contiguous()
    assert actual.dtype == batch.q.dtype
    tolerance = TOLERANCE[batch.q.dtype]
    expected = attend(REFERENCE, in_type(batch, torch.float32))
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)
    return actual


@numbers
@few
@given(
    lengths=st.lists(st.one_of(decode_row, prefill_row), min_size=1, max_size=4),
    page_tokens=st.sampled_from([1, 7, 16, 64]),
    num_kv_heads=st.integers(1, 2),
    backwards=st.booleans(),
    num_processors=st.sampled_from([1, 8, MANY_PROCESSORS]),
    seed=st.integers(0, 1000),
)
def test_paged_attention(
    launcher: EmulatedLauncher,
    x_type: torch.dtype,
    kv_type: torch.dtype,
    head_dim: int,
    group: int,
    lengths: list[tuple[int, int]],
    page_tokens: int,
    num_kv_heads: int,
    backwards: bool,
    num_processors: int,
    seed: int,
) -> None:
    launcher.backwards, launcher.num_processors = backwards, num_processors
    batch = make_paged(lengths, page_tokens, num_kv_heads, group, head_dim, seed, NAMES[kv_type])
    check_attention(launcher, in_type(batch, x_type))


@pytest.mark.parametrize("num_processors", [1, 40, MANY_PROCESSORS])
@pytest.mark.parametrize("backwards", [False, True])
def test_splits_of_long_contexts(launcher: EmulatedLauncher, backwards: bool, num_processors: int) -> None:
    launcher.backwards, launcher.num_processors = backwards, num_processors
    lengths = [(1, context) for context in (3000, 1, 257, 1024)]
    check_attention(launcher, make_paged(lengths, page_tokens=16, num_kv_heads=1, group=3, head_dim=64))


def test_a_split_depends_on_shapes_only() -> None:
    assert num_splits(1, 8, 100_000, num_processors=132) == 64
    assert num_splits(32, 8, 100_000, num_processors=132) == 3
    assert num_splits(128, 8, 100_000, num_processors=132) == 1
    assert num_splits(1, 8, 300, num_processors=132) == 2
    assert num_splits(1, 1, 16, num_processors=132) == 1


@pytest.mark.parametrize("lengths", [[(1, 40), (1, 700)], [(1, 40), (5, 9), (1, 700), (30, 30)]])
@pytest.mark.parametrize("num_processors", [1, MANY_PROCESSORS])
def test_padding_rows_give_zeros_and_write_nothing(
    launcher: EmulatedLauncher, lengths: list[tuple[int, int]], num_processors: int
) -> None:
    launcher.num_processors = num_processors
    batch = make_paged(lengths, page_tokens=16, num_kv_heads=1, group=3, head_dim=64)
    num_tokens, num_padding = len(batch.q), 3
    fill = torch.full((num_padding,), -1)
    tables, starts = batch.block_tables, batch.query_start
    padded = replace(
        batch,
        q=torch.cat((batch.q, torch.full((num_padding, 3, 64), POISON))),
        k=torch.cat((batch.k, torch.full((num_padding, 1, 64), 7.0))),
        v=torch.cat((batch.v, torch.full((num_padding, 1, 64), 7.0))),
        positions=torch.cat((batch.positions, fill)),
        block_tables=torch.cat((tables, torch.zeros_like(tables[:1]).expand(num_padding, -1))),
        query_start=torch.cat((starts, starts[-1] + torch.arange(1, num_padding + 1, dtype=torch.int32))),
        context_lens=torch.cat((batch.context_lens, torch.zeros(num_padding, dtype=torch.int32))),
    )
    found = check_attention(launcher, padded)
    assert torch.equal(found[num_tokens:], torch.zeros(num_padding, 3, 64))

    cos_sin = torch.randn(1000, 64)
    pools = []
    for ops, rows in ((CudaOps(launcher), padded), (REFERENCE, padded), (REFERENCE, batch)):
        pool = rows.kv_layer.clone()
        ops.rotary_and_store(
            rows.q, rows.k, rows.v, cos_sin, rows.positions, pool, rows.block_tables, rows.query_start
        )  # fmt: skip
        pools.append(pool)
    torch.testing.assert_close(pools[0], pools[2], equal_nan=True)
    torch.testing.assert_close(pools[1], pools[2], equal_nan=True)


def test_large_scores_do_not_overflow(launcher: EmulatedLauncher) -> None:
    batch = make_paged([(1, 600), (1, 600), (7, 40)], page_tokens=16, num_kv_heads=1, group=3, head_dim=64)
    batch.q.mul_(3000.0)
    actual = attend(CudaOps(launcher), batch)
    torch.testing.assert_close(actual, attend(REFERENCE, batch), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("new", [1, 5])
def test_a_nan_query_stays_nan_and_in_its_row(launcher: EmulatedLauncher, new: int) -> None:
    batch = make_paged([(new, 40), (1, 40)], page_tokens=16, num_kv_heads=1, group=3, head_dim=64)
    batch.q[0] = POISON
    actual = attend(CudaOps(launcher), batch)
    assert torch.isnan(actual[0]).all()
    assert torch.isfinite(actual[1:]).all()


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("position", [0, 295])
def test_a_nan_in_the_context_reaches_the_result(
    launcher: EmulatedLauncher, position: int, side: int, new: int
) -> None:
    batch = make_paged([(new, 300)], page_tokens=16, num_kv_heads=1, group=1, head_dim=8)
    batch.kv_layer[batch.block_tables[0, position // 16], side, 0, position % 16] = POISON
    assert torch.isnan(attend(CudaOps(launcher), batch)).all()


def test_a_key_that_is_nan_spoils_nobody_before_it(launcher: EmulatedLauncher) -> None:
    batch = make_paged([(8, 100)], page_tokens=16, num_kv_heads=1, group=1, head_dim=8)
    batch.kv_layer[batch.block_tables[0, 6], 0, 0, 97 % 16] = POISON
    spoiled = torch.isnan(attend(CudaOps(launcher), batch)).flatten(1).all(dim=1)
    assert spoiled.tolist() == [False] * 5 + [True] * 3


@pytest.mark.parametrize(("x_type", "kv_type"), KV_PAIRS)
@few
@given(
    lengths=st.lists(st.one_of(decode_row, prefill_row), min_size=1, max_size=4),
    page_tokens=st.sampled_from([1, 7, 16, 64]),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([8, 64, 80, 96, 128]),
    backwards=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rotary_and_store(
    launcher: EmulatedLauncher,
    x_type: torch.dtype,
    kv_type: torch.dtype,
    lengths: list[tuple[int, int]],
    page_tokens: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    backwards: bool,
    seed: int,
) -> None:
    launcher.backwards = backwards
    batch = in_type(make_paged(lengths, page_tokens, num_kv_heads, group, head_dim, seed, NAMES[kv_type]), x_type)
    angles = torch.outer(torch.arange(256.0), 1e4 ** -torch.linspace(0, 1, head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(x_type)
    pools = []
    for ops, kind in ((CudaOps(launcher), x_type), (REFERENCE, torch.float32)):
        rows, pool = in_type(batch, kind), batch.kv_layer.clone()
        rotated = ops.rotary_and_store(
            rows.q, rows.k, rows.v, cos_sin.to(kind), rows.positions, pool, rows.block_tables, rows.query_start
        )
        assert rotated.is_contiguous()
        pools.append((rotated.float(), (decode_fp8(pool) if kv_type == torch.uint8 else pool).float()))
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[x_type]
    torch.testing.assert_close(pools[0][0], pools[1][0], rtol=tolerance, atol=tolerance)
    # Equal where the reference wrote, and the poison untouched everywhere else. A value next to a border of two codes
    # may fall to either side: half a step of the type, at most.
    step = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.uint8: 0.13}[kv_type]
    torch.testing.assert_close(pools[0][1], pools[1][1], rtol=step, atol=1e-6, equal_nan=True)
    close = torch.isclose(pools[0][1], pools[1][1], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert (~close).float().mean() < 0.002, "borders are rare"


def test_rows_of_fp8_are_those_of_the_reference(launcher: EmulatedLauncher) -> None:
    """Of every magnitude, zeros and what is no number among them, and one in which all lie between two codes."""
    rows = torch.randn(300, 64) * torch.logspace(-36, 36, 300).unsqueeze(1)
    rows[7], rows[8, 3], rows[9, 5] = 0.0, POISON, float("inf")
    between = torch.tensor([17.0, 19, 21, 23, 25, 27, 29, 31])
    rows[10] = torch.cat((between, -between / 256, 2.0**-14 * between, -(2.0**-10) * torch.arange(1.0, 81, 2)))
    rows[10, 0] = 448.0  # which makes the scale 1
    kv_layer = torch.zeros(300, 2, 1, 1, 68, dtype=torch.uint8)
    tables, starts = torch.arange(300, dtype=torch.int32).unsqueeze(1), torch.arange(301, dtype=torch.int32)
    x, cos_sin = rows.unsqueeze(1), torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1)
    CudaOps(launcher).rotary_and_store(
        x, torch.zeros_like(x), x, cos_sin, torch.zeros(300, dtype=torch.int64), kv_layer, tables, starts
    )
    is_number = torch.ones(300, dtype=torch.bool)
    is_number[[8, 9]] = False
    found, expected = kv_layer[:, 1, 0, 0], encode_fp8(rows)
    differing = (found[is_number] != expected[is_number]).sum(dim=1)
    assert (differing <= 1).all(), "a value on a border, at most"
    assert (differing > 0).float().mean() < 0.05
    assert torch.equal(found[10], expected[10])
    assert torch.isnan(decode_fp8(found[~is_number])).all()


def test_every_fp8_code_is_read_for_what_it_is(launcher: EmulatedLauncher) -> None:
    """One row of values a code, each the whole answer of its own query."""
    codes = torch.tensor([code for code in range(256) if code not in (0x7F, 0xFF)], dtype=torch.uint8)
    rows = torch.cat((codes.unsqueeze(1).expand(-1, 64), torch.full((len(codes), 1), 0.37).view(torch.uint8)), dim=1)
    kv_layer = encode_fp8(torch.zeros(len(codes), 2, 1, 1, 64))
    kv_layer[:, 1, 0, 0] = rows
    tables = torch.arange(len(codes), dtype=torch.int32).unsqueeze(1)
    starts, ones = torch.arange(len(codes) + 1, dtype=torch.int32), torch.ones(len(codes), dtype=torch.int32)
    q = torch.ones(len(codes), 3, 64)
    found = CudaOps(launcher).paged_attention(q, kv_layer, tables, starts, ones, 1.0)
    torch.testing.assert_close(found[:, 0], decode_fp8(rows), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("head_dim", "kind"), [(12, torch.float32), (256, torch.float32), (16, torch.float64)])
def test_what_kernels_do_not_know_takes_the_reference_way(
    launcher: EmulatedLauncher, head_dim: int, kind: torch.dtype
) -> None:
    batch = make_paged([(1, 20), (5, 9)], page_tokens=16, num_kv_heads=1, group=3, head_dim=head_dim)
    batch = replace(batch, kv_layer=batch.kv_layer.to(kind))
    assert torch.equal(attend(CudaOps(launcher), batch), attend(REFERENCE, batch))
