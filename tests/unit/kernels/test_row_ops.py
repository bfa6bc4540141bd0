"""Ops that take each row of a step for itself, against the reference."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.ops import warm_up
from kernels.packing import pack
from tests.support_kernels import CPU, REFERENCE, few
from tests.support_paged import POISON


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    warm_up()


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


def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    """One thread computes a few, all of them many."""
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(50, 128, generator=generator)
    for count in (1, 8, 9, 32, 33):
        assert torch.equal(CPU.silu_mul(gate_up)[:count], CPU.silu_mul(gate_up[:count]))
    for width in (5, 8, 31, 32, 77, 576):
        x, residual = torch.randn(2, 50, width, generator=generator)
        weight = torch.randn(width, generator=generator)
        normed, (added, total) = CPU.rms_norm(x, weight, 1e-5), CPU.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(added, CPU.rms_norm(total, weight, 1e-5))
        for count in (1, 8, 9, 32, 33):
            few_added, few_total = CPU.add_rms_norm(x[:count], residual[:count], weight, 1e-5)
            assert torch.equal(normed[:count], CPU.rms_norm(x[:count], weight, 1e-5))
            assert torch.equal(added[:count], few_added)
            assert torch.equal(total[:count], few_total)


NORMS = """
import hashlib, sys, torch
from kernels.cpu.norm import add_rms_norm, rms_norm
torch.set_num_threads(int(sys.argv[1]))
generator = torch.Generator().manual_seed(3)
x, residual = torch.randn(2, 40, 997, generator=generator)
weight = torch.randn(997, generator=generator)
found = [rms_norm(x, weight, 1e-5), *add_rms_norm(x, residual, weight, 1e-5)]
few = [rms_norm(x[:3], weight, 1e-5), *add_rms_norm(x[:3], residual[:3], weight, 1e-5)]
print([hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in (*found, *few)])
"""


def test_norms_have_the_same_bits_compiled_anew_and_out_of_the_cache(tmp_path: Path) -> None:
    def run(cache: Path | None, num_threads: int) -> str:
        env = os.environ | ({"NUMBA_CACHE_DIR": str(cache)} if cache else {})
        argv = [sys.executable, "-c", NORMS, str(num_threads)]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=300).stdout

    anew = run(tmp_path, 1)
    assert any(tmp_path.iterdir())
    assert run(tmp_path, 2) == anew
    assert run(None, 2) == anew


def test_sums_of_other_types_go_by_the_reference() -> None:
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64).half(), torch.randn(64)
    for one, other in zip(
        CPU.add_rms_norm(x, residual, weight, 1e-5), REFERENCE.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_product_of_rows_that_do_not_fit_is_refused() -> None:
    weight = pack(np.ones((16, 64), np.float32), "float16")
    for shape in ((2, 63), (2, 3, 64)):
        with pytest.raises(ValueError, match="rows of 64"):
            CPU.linear(torch.ones(shape), weight)


@pytest.mark.parametrize("rows", [1, 50])
def test_activation_of_values_beyond_all_measure(rows: int) -> None:
    extremes = [1e37, -1e37, 1e30, -1e30, 200.0, -200.0, -86.0, -86.1, -60.0, 1e-40, -1e-40, 0.0, -0.0]
    bad = [POISON, float("inf"), float("-inf")]
    gate = torch.tensor(extremes + bad).repeat(rows, 1)
    gate_up = torch.cat((gate, torch.full(gate.shape, 2.0)), dim=1)
    actual, expected = CPU.silu_mul(gate_up), REFERENCE.silu_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-30, equal_nan=True)
