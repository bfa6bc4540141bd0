"""Units gathered into one buffer and scattered again: every implementation beside the reference, to the byte."""

import mmap
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cpu.ops import CpuOps
from kernels.cuda import gather
from kernels.cuda.ops import CudaOps
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from tests.support_cuda import EmulatedLauncher

REFERENCE: Ops = ReferenceOps()
GUARD = 64
SIZES = (1, 3, 4, 8, 12, 15, 16, 17, 48, 100, 1024, 4094, 4096, 4100, 9001, 12_288)

few = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(params=["cpu", "cuda"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return CpuOps() if request.param == "cpu" else CudaOps(request.getfixturevalue("launcher"))


def guarded(shape: tuple[int, ...], skew: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes, and in the middle of them those of that shape; skew: how far from an aligned address."""
    count = torch.Size(shape).numel()
    raw = torch.randint(256, (count + 2 * GUARD + skew,), dtype=torch.uint8, generator=random)
    return raw, raw[GUARD + skew :][:count].view(shape)


def chosen_of(num_units: int, runs: list[int], random: torch.Generator) -> torch.Tensor:
    """Runs of neighbours, as many as there is room for, in no order; no unit twice."""
    order, at = [], 0
    for length in runs:
        if at + length > num_units:
            break
        order.append(torch.arange(at, at + length))
        at += length
    units = [order[k] for k in torch.randperm(len(order), generator=random).tolist()]
    return torch.cat([*units, torch.zeros(0, dtype=torch.int64)])


@few
@given(
    size=st.sampled_from(SIZES),
    num_layers=st.integers(1, 4),
    runs=st.lists(st.integers(1, 9), max_size=8),
    skews=st.tuples(st.sampled_from([0, 0, 1, 4, 8]), st.sampled_from([0, 0, 1, 4, 8])),
    backwards=st.booleans(),
    processors=st.sampled_from([1, 8]),
    seed=st.integers(0, 99),
)
def test_units_come_and_go_and_nothing_else_changes(
    ops: Ops,
    launcher: EmulatedLauncher,
    size: int,
    num_layers: int,
    runs: list[int],
    skews: tuple[int, int],
    backwards: bool,
    processors: int,
    seed: int,
) -> None:
    launcher.backwards, launcher.num_processors = backwards, processors
    random = torch.Generator().manual_seed(seed)
    num_units = 20
    units = chosen_of(num_units, runs, random)
    state_raw, state = guarded((num_layers, num_units, size), skews[0], random)
    buffer_raw, buffer = guarded((num_layers, len(units), size), skews[1], random)
    before, around = state_raw.clone(), buffer_raw.clone()
    ops.gather_units(state, units, buffer)
    REFERENCE.gather_units(state, units, around[GUARD + skews[1] :][: buffer.numel()].view(buffer.shape))
    assert torch.equal(buffer_raw, around)
    assert torch.equal(state_raw, before)
    buffer.bitwise_not_()
    REFERENCE.scatter_units(before[GUARD + skews[0] :][: state.numel()].view(state.shape), units, buffer)
    ops.scatter_units(state, units, buffer)
    assert torch.equal(state_raw, before)


def test_some_layers_are_state_too(ops: Ops) -> None:
    whole = torch.randint(256, (6, 9, 100), dtype=torch.uint8)
    units, buffer = torch.tensor([7, 2, 3, 4]), torch.zeros(2, 4, 100, dtype=torch.uint8)
    ops.gather_units(whole[3:5], units, buffer)
    assert torch.equal(buffer, whole[3:5][:, units])
    expected = whole.clone()
    expected[3:5, units] = 255 - buffer
    ops.scatter_units(whole[3:5], units, 255 - buffer)
    assert torch.equal(whole, expected)


def test_places_beyond_what_32_bits_count(ops: Ops) -> None:
    """In memory of which only the touched pages are there."""
    size, num_units, num_layers = 1 << 20, 1500, 3
    fd = os.memfd_create("far")
    os.ftruncate(fd, num_layers * num_units * size)
    memory = mmap.mmap(fd, 0)
    os.close(fd)
    state = torch.frombuffer(memory, dtype=torch.uint8).view(num_layers, num_units, size)
    units = torch.tensor([1499, 0, 7])
    buffer = torch.randint(256, (num_layers, 3, size), dtype=torch.uint8)
    ops.scatter_units(state, units, buffer)
    for k, unit in enumerate(units.tolist()):
        assert torch.equal(state[:, unit], buffer[:, k])
    back = torch.zeros_like(buffer)
    ops.gather_units(state, units, back)
    assert torch.equal(back, buffer)


def test_what_the_kernels_do_not_take_goes_the_references_way(
    launcher: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_launch", None)
    ops, state = CudaOps(launcher), torch.arange(240, dtype=torch.uint8).view(2, 10, 12)
    apart, buffer = state[:, ::2], torch.zeros(2, 2, 12, dtype=torch.uint8)
    ops.gather_units(apart, torch.tensor([4, 0]), buffer)
    assert torch.equal(buffer, state[:, [8, 0]])
    ops.scatter_units(apart, torch.tensor([1, 2]), buffer)
    assert torch.equal(state[:, [2, 4]], buffer)
