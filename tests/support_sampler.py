"""Rows to sample, for the tests of the sampler."""

import math
from collections.abc import Sequence

import torch

from shared.engine.sampler import SampleRow, sample
from shared.protocol.messages import SamplingSpec

EOS = 1


def spec(**fields: object) -> SamplingSpec:
    return SamplingSpec.model_validate(fields)


def row(
    sampling: SamplingSpec, position: int = 0, choice: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> SampleRow:
    return SampleRow(sampling, choice, position, prompt, output, frozenset({EOS}))


def token(logits: Sequence[float], sampling: SamplingSpec, **fields: object) -> int:
    return sample(torch.tensor([logits]), [row(sampling, **fields)])[0].token  # type: ignore[arg-type]


def drawn(logits: Sequence[float], sampling: SamplingSpec, count: int = 400, **fields: object) -> set[int]:
    """Every token that comes up at `count` positions."""
    rows = [row(sampling, position=p, **fields) for p in range(count)]  # type: ignore[arg-type]
    return {s.token for s in sample(torch.tensor([list(logits)] * count), rows)}


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]
