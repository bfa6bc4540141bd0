"""Kernels compiled at run time and launched through CuPy, on the stream torch works on.

The only file that imports CuPy. A kernel is compiled, and loaded into the device, at its first launch, which a CUDA
graph's capture cannot hold: run once what is to be captured. CuPy keeps what it compiled on disk.
"""

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import torch

from kernels.cuda.launch import Argument, Kernel, source_text

_OPTIONS = ("-std=c++17",)


class CupyLauncher:
    """For the current device of torch. The compute thread owns it."""

    def __init__(self) -> None:
        device = torch.cuda.current_device()
        self.num_processors: int = torch.cuda.get_device_properties(device).multi_processor_count
        self._functions: dict[Kernel, Callable[..., None]] = {}
        self._streams: dict[int, Any] = {}

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], num_threads: int, *arguments: Argument) -> None:
        function = self._functions.get(kernel)
        if function is None:
            function = self._functions[kernel] = self._load(kernel)
        address = torch.cuda.current_stream().cuda_stream
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = cupy.cuda.ExternalStream(address)
        with stream:
            function(grid, (num_threads, 1, 1), tuple(_scalar(argument) for argument in arguments))

    def _load(self, kernel: Kernel) -> Callable[..., None]:
        module = cupy.RawModule(
            code=source_text(kernel.source), options=_OPTIONS, name_expressions=(kernel.expression,)
        )
        function: Callable[..., None] = module.get_function(kernel.expression)
        return function


def _scalar(argument: Argument) -> np.generic:
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, torch.Tensor):
        return np.uint64(argument.data_ptr())
    return np.int32(argument) if isinstance(argument, int) else np.float32(argument)
