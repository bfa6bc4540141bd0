"""The GPU's other kernels, compiled for a CPU, against the reference, and what surrounds them on the host."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cuda import linear
from kernels.cuda import ops as cuda_ops
from kernels.cuda.ops import KERNELS, KV_TYPES, CudaOps, warm_up
from kernels.ops import Ops, get_ops
from kernels.packing import pack, unpack
from kernels.reference import ReferenceOps
from tests.support_cuda import X_TYPES, EmulatedLauncher
from tests.support_paged import make_paged

REFERENCE: Ops = ReferenceOps()
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

few = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """expected: in float32, of the same inputs."""
    assert actual.is_contiguous()
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", X_TYPES)
@few
@given(
    rows=st.integers(1, 9),
    width=st.sampled_from([4, 64, 576, 1540, 4100]),
    backwards=st.booleans(),
    seed=st.integers(0, 99),
)
def test_norms_and_activation(
    launcher: EmulatedLauncher, kind: torch.dtype, rows: int, width: int, backwards: bool, seed: int
) -> None:
    launcher.backwards = backwards
    ops, generator = CudaOps(launcher), torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, width, generator=generator).to(kind)
    weight = torch.randn(width, generator=generator).to(kind)
    gate_up = (5 * torch.randn(rows, 2 * width, generator=generator)).to(kind)
    check(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.float(), weight.float(), 1e-5))
    check(ops.silu_mul(gate_up), REFERENCE.silu_mul(gate_up.float()))
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    check(normed, REFERENCE.rms_norm((x + residual).float(), weight.float(), 1e-5))
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5)), "what is normed is the rounded sum"


def test_rows_that_lie_apart_or_askew_are_taken(launcher: EmulatedLauncher) -> None:
    ops, weight = CudaOps(launcher), torch.randn(64)
    apart, askew = torch.randn(5, 100)[:, 3:67], torch.randn(5 * 64 + 1)[1:].view(5, 64)
    for x in (apart, askew):
        check(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
        check(ops.add_rms_norm(x, x, weight, 1e-5)[0], REFERENCE.add_rms_norm(x, x, weight, 1e-5)[0])
        check(ops.silu_mul(x), REFERENCE.silu_mul(x))


def test_no_rows_and_odd_widths(launcher: EmulatedLauncher) -> None:
    ops = CudaOps(launcher)
    assert ops.rms_norm(torch.empty(0, 64), torch.ones(64), 1e-5).shape == (0, 64)
    assert ops.add_rms_norm(torch.empty(0, 64), torch.empty(0, 64), torch.ones(64), 1e-5)[1].shape == (0, 64)
    assert ops.silu_mul(torch.empty(0, 64)).shape == (0, 32)
    x, weight = torch.randn(3, 7), torch.randn(7)
    check(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    check(ops.silu_mul(x[:, :6]), REFERENCE.silu_mul(x[:, :6]))


@pytest.mark.parametrize("format", ["int8", "int4"])
@few
@given(
    rows=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 32, 33]),
    width=st.sampled_from([8, 40, 64, 100, 576]),
    outputs=st.integers(1, 50),
    bias=st.booleans(),
    backwards=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packed_products(
    launcher: EmulatedLauncher,
    format: str,
    rows: int,
    width: int,
    outputs: int,
    bias: bool,
    backwards: bool,
    seed: int,
) -> None:
    launcher.backwards = backwards
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    weight = pack(torch.randn(outputs, width, generator=generator).numpy(), format)
    offset = torch.randn(outputs, generator=generator) if bias else None
    actual = CudaOps(launcher).linear(x, weight, offset)
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, REFERENCE.linear(x, weight, offset), rtol=1e-5, atol=2e-5 * width**0.5)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize(("outputs", "width"), [(5, 7), (50, 100)])
def test_panels_are_unpacked_in_parts_as_a_whole(
    launcher: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch, format: str, outputs: int, width: int
) -> None:
    weight = pack(np.random.default_rng(3).standard_normal((outputs, width), np.float32), format)
    placed = linear.place(weight, torch.device("cpu"))
    whole = linear.unpack_panels(placed, 0, len(weight.panels))
    assert torch.equal(whole[:outputs], torch.from_numpy(unpack(weight)))
    monkeypatch.setattr(linear, "_UNPACKED_BYTES", 4 * 16 * width)  # a panel at a time
    x, bias = torch.randn(linear.MAX_KERNEL_ROWS + 1, width), torch.randn(outputs)
    product = CudaOps(launcher).linear(x, weight, bias)
    torch.testing.assert_close(product, REFERENCE.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_float16_weights_are_a_half_product(launcher: EmulatedLauncher) -> None:
    weight = pack(np.random.default_rng(1).standard_normal((20, 64), np.float32), "float16")
    x, bias = torch.randn(3, 64), torch.randn(20)
    found = CudaOps(launcher).linear(x, weight, bias)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, REFERENCE.linear(x, weight, bias), rtol=1e-2, atol=2e-2)


def test_plain_weights_are_torchs_and_a_packed_one_is_placed_once(
    launcher: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, x = CudaOps(launcher), torch.randn(2, 64)
    plain = torch.randn(9, 64)
    assert torch.equal(ops.linear(x, plain), x @ plain.T)
    weight = pack(plain.numpy(), "int8")
    first = ops.linear(x, weight)
    monkeypatch.delattr(linear, "place")
    assert torch.equal(ops.linear(x, weight), first)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8"])
def test_warm_up_goes_through_every_kernel(launcher: EmulatedLauncher, kv_dtype: str) -> None:
    launched: set[str] = set()

    class Noting:
        num_processors = 100

        def launch(self, kernel: object, *arguments: object) -> None:
            launched.add(kernel.expression.split("<")[0])  # type: ignore[attr-defined]
            launcher.launch(kernel, *arguments)  # type: ignore[arg-type]

    warm_up(kv_dtype, ops=CudaOps(Noting()), device="cpu")
    assert launched == {kernel.name for kernel in KERNELS} | {"combine_splits"}


def test_traffic_counts_what_a_call_must_move() -> None:
    num_bytes = {kernel.name: kernel.num_bytes for kernel in KERNELS}
    x, weight = torch.zeros(2, 64), torch.zeros(64)
    assert num_bytes["rms_norm"](x, weight, 1e-5) == (2 + 2 + 1) * 64 * 4
    assert num_bytes["add_rms_norm"](x, x, weight, 1e-5) == (4 * 2 + 1) * 64 * 4
    assert num_bytes["silu_mul"](x) == (128 + 64) * 4
    units = torch.zeros(3, dtype=torch.int64)
    state, buffer = (torch.zeros(2, count, 16, dtype=torch.uint8) for count in (5, 3))
    assert num_bytes["gather_units"](state, units, buffer) == 2 * 2 * 3 * 16 + 3 * 8
    packed = pack(np.zeros((32, 64), np.float32), "int8")
    assert num_bytes["linear_int8"](x, packed) == 2 * 64 * 4 + 32 * 64 + 32 * 4 + 2 * 32 * 4
    batch = make_paged([(1, 5), (1, 7)], page_tokens=4, num_kv_heads=2, group=3, head_dim=8, kv_dtype="fp8")
    where = (batch.kv_layer, batch.block_tables, batch.query_start)
    a_position = 2 * 2 * (8 + 4)
    attention = num_bytes["decode_attention"](batch.q, *where, batch.context_lens, 1.0)
    assert attention == 12 * a_position + 2 * 2 * 6 * 8 * 4
    stored = num_bytes["rotary_and_store"](
        batch.q, batch.k, batch.v, torch.zeros(9, 8), torch.tensor([4, -1]), *where
    )  # fmt: skip
    assert stored == 2 * 6 * 8 * 4 + 2 * 2 * 8 * 4 + 8 * 4 + a_position + 2 * 8


def test_without_cupy_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "kernels.cuda.cupy_launcher", raising=False)
    cuda_ops._cupy_launcher.cache_clear()
    with pytest.raises(ImportError, match=r"install baton-serving\[cuda\]"):
        get_ops("cuda")


def test_kv_types_hold_those_of_a_cpu() -> None:
    from kernels.cpu.ops import KV_TYPES as OF_A_CPU

    assert OF_A_CPU.items() <= KV_TYPES.items()
