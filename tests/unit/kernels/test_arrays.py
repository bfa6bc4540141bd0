"""Looks at tensors that are cheaper than torch's own."""

import numpy as np
import torch

from kernels.cpu.arrays import Last


def test_the_array_is_always_that_of_the_tensor_asked_for() -> None:
    last = Last()
    for value in range(3):
        tensor = torch.full((4,), value)
        assert last(tensor) is last(tensor)
        assert np.array_equal(last(tensor), np.full(4, value))
        tensor += 10
        assert np.array_equal(last(tensor), np.full(4, value + 10))
        del tensor


def test_a_view_of_the_same_memory_is_another_tensor() -> None:
    last, whole = Last(), torch.arange(6)
    assert last(whole).shape == (6,)
    assert last(whole[:4]).shape == (4,)
