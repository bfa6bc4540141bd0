"""Tensors as kernels take them, without what torch asks for each look at one: some 2 us, so that such looks
were a tenth of a step of one row."""

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from kernels.cpu.vector import F32

_intrinsic: Any = intrinsic
_types: Any = types


class Last:
    """The array of the tensor that was asked for last: a step passes the same ones to every layer. Holds on to it; its
    numbers may change, where they lie may not."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor | None, np.ndarray] = (None, np.empty(0))

    def __call__(self, tensor: torch.Tensor) -> np.ndarray:
        known, array = self._last
        if known is not tensor:
            array = tensor.numpy()
            self._last = (tensor, array)
        return array


def _floats_at(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], F32.as_pointer())

    return _types.CPointer(_types.float32)(_types.int64), generate


floats_at: Any = _intrinsic(_floats_at)
"""floats_at(address) inside a kernel: for `carray`. Whoever calls the kernel keeps the memory."""
