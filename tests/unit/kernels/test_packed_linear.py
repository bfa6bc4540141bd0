"""Products with packed weights against the reference, and what the formats promise."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.ops import KV_TYPES, CpuOps, warm_up
from kernels.cpu.vectors import has_vectors
from kernels.ops import Ops
from kernels.packing import FORMATS, PackedWeight, pack, take_rows, unpack
from kernels.reference import ReferenceOps

ROOT = Path(__file__).parents[3]
CPU: Ops = CpuOps()
REFERENCE: Ops = ReferenceOps()

formats = pytest.mark.parametrize("name", FORMATS)
few = settings(max_examples=40, deadline=None, derandomize=True)

# Of the product's size: what rounds here are sums, and x itself where the format multiplies whole numbers.
TOLERANCE = {"float16": 1e-5, "int8": 1e-5, "int4": 2e-2}
# Of the largest weight of an output (int4: of a block): half a step.
WEIGHT_ERROR = {"float16": 5e-4, "int8": 0.5 / 127 + 1e-6, "int4": 1 / 15 + 2e-3}


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    warm_up()


def packed(num_out: int, width: int, name: str, seed: int = 0) -> PackedWeight:
    return pack(np.random.default_rng(seed).standard_normal((num_out, width), dtype=np.float32), name)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-9))


@formats
@few
@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 200),
    outputs=st.integers(1, 90),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_agree_with_the_reference(
    name: str, rows: int, width: int, outputs: int, bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width + 2, generator=generator)[:, 2:]
    weight = packed(outputs, width, name, seed)
    offset = torch.randn(outputs, generator=generator) if bias else None
    actual = CPU.linear(x, weight, offset)
    assert actual.is_contiguous()
    assert actual.shape == (rows, outputs)
    expected = REFERENCE.linear(x, weight, offset)
    assert distance(actual, expected) < TOLERANCE[name]


@formats
@pytest.mark.parametrize("width", [2048, 2049, 4500])
def test_wide_products_are_summed_in_blocks(name: str, width: int) -> None:
    x, weight = torch.randn(7, width), packed(40, width, name)
    assert distance(CPU.linear(x, weight), REFERENCE.linear(x, weight)) < TOLERANCE[name]


@formats
def test_a_row_is_the_same_in_any_batch_and_on_any_number_of_threads(name: str) -> None:
    x, weight = torch.randn(67, 131), packed(100, 131, name)
    whole = CPU.linear(x, weight)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 40):
        for first in (0, 67 - rows):
            assert torch.equal(CPU.linear(x[first : first + rows], weight), whole[first : first + rows])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(CPU.linear(x, weight), whole)
    finally:
        torch.set_num_threads(threads)


@formats
@pytest.mark.parametrize("loud", [1e4, float("nan"), float("inf")])
def test_a_loud_row_does_not_move_another(name: str, loud: float) -> None:
    x, weight = torch.randn(9, 96), packed(33, 96, name)
    quiet = CPU.linear(x, weight)
    x[4] *= loud
    noisy = CPU.linear(x, weight)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(noisy[others], quiet[others])
    if not np.isfinite(loud):
        assert not torch.isfinite(noisy[4]).any()


@formats
@few
@given(width=st.integers(1, 100), outputs=st.integers(1, 50), seed=st.integers(0, 99))
def test_packing_keeps_the_weights(name: str, width: int, outputs: int, seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((outputs, width), dtype=np.float32)
    kept = pack(weight, name)
    back = unpack(kept)
    assert back.shape == weight.shape
    assert back.dtype == np.float32
    assert np.abs(back - weight).max() <= WEIGHT_ERROR[name] * 2 * np.abs(weight).max()
    rows = np.array([outputs - 1, 0, outputs // 2])
    assert np.array_equal(take_rows(kept, rows), back[rows])


def test_four_bits_hold_what_has_sixteen_levels_a_block() -> None:
    """A model that comes in Q4_1 loses nothing."""
    random = np.random.default_rng(0)
    levels = random.integers(0, 16, (24, 3, 32))
    levels[..., 0], levels[..., 1] = 0, 15
    step, least = (random.standard_normal((2, 24, 3, 1)) / 16).astype(np.float16).astype(np.float32)
    weight = (levels * np.abs(step) + least).astype(np.float32).reshape(24, 96)
    assert np.allclose(unpack(pack(weight, "int4")), weight, rtol=0, atol=1e-6)


def test_zeros_and_single_values_have_no_step() -> None:
    for name in FORMATS:
        for value in (0.0, 0.5):
            assert (unpack(pack(np.full((3, 40), value, np.float32), name)) == value).all()


@pytest.mark.parametrize("name", ["float16", "int4"])
def test_what_float16_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="too large for float16"):
        pack(np.full((2, 3), -1e5, np.float32), name)


PLAIN = """
import numpy as np, torch
from kernels.cpu.linear import fit_for_this_machine
from kernels.cpu.ops import KV_TYPES, CpuOps, warm_up
from kernels.cpu.vectors import has_vectors
from kernels.packing import FORMATS, pack, unpack
from tests.support_kernels import CPU, REFERENCE
from tests.support_paged import attend, make_paged
for name in KV_TYPES:
    warm_up(name)
    batch = make_paged([(1, 20), (5, 9)], 16, num_kv_heads=1, group=3, head_dim=16, kv_dtype=name)
    print(name, torch.allclose(attend(CPU, batch), attend(REFERENCE, batch), atol=1e-5))
for name in FORMATS:
    weight = pack(np.random.default_rng(0).standard_normal((5, 40), dtype=np.float32), name)
    x, fit = torch.randn(3, 40), fit_for_this_machine(weight)
    same = torch.allclose(CpuOps().linear(x, fit), x @ torch.from_numpy(unpack(weight)).T, atol=1e-4)
    print(has_vectors(), isinstance(fit, torch.Tensor), same)
"""


def test_without_vector_instructions_weights_are_unpacked_and_every_kv_type_works() -> None:
    """NUMBA_CPU_NAME makes numba compile for a processor that has none of them."""
    plain = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], env=plain, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    kv = [word for name in KV_TYPES for word in (name, "True")]
    assert done.stdout.split() == [*kv, *["False", "True", "True"] * len(FORMATS)], done.stderr


def test_this_machine_has_the_vector_instructions_the_kernels_are_for() -> None:
    if not has_vectors():
        pytest.skip("a processor without AVX2, FMA or F16C: packed weights are unpacked, which is tested above")
    assert isinstance(CPU.linear(torch.ones(1, 8), packed(3, 8, "float16")), torch.Tensor)
