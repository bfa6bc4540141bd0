"""Engines on the GPU's kernels, emulated: recorded decode steps, padding, and state that passes through host memory."""

import torch

from benchmarks.gpu_engine import check_engine
from benchmarks.gpu_models import TINY
from benchmarks.gpu_speed import compare_graphs
from benchmarks.gpu_stages import Findings
from kernels.cuda.ops import CudaOps
from shared.engine.graphs import Replay
from tests.support_cuda import EmulatedLauncher

CPU = torch.device("cpu")


def again(work: Replay) -> Replay:
    """What replaying a graph does, computed anew."""
    return work


def test_a_prompt_handed_over_and_decoded_is_what_the_reference_says(launcher: EmulatedLauncher) -> None:
    findings = Findings()
    check_engine(findings, CudaOps(launcher), CPU, again)
    assert findings.wrong == []


def test_padded_steps_are_those_of_eager_ones(launcher: EmulatedLauncher) -> None:
    findings = Findings()
    compare_graphs(findings, TINY, CudaOps(launcher), CPU, again, (1, 2, 4, 8))
    assert findings.wrong == []
