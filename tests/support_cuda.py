"""The CUDA sources compiled by g++ and run on a CPU, block after block, behind the launcher the ops use on a GPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.cuda.launch import Argument, Kernel, instance, source_text

GXX = shutil.which("g++")

_SHIM = Path(__file__).parent / "unit/kernels/cuda_host/shim.h"
_FLAGS = (
    "-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-w",
    "-fsanitize=bounds-strict,alignment", "-fsanitize-undefined-trap-on-error",
)  # fmt: skip
_F32, _F16, _BF16, _FP8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
X_TYPES = (_F32, _F16, _BF16)
KV_PAIRS = ((_F32, _F32), (_F32, _F16), (_F32, _FP8), (_F16, _F16), (_F16, _FP8), (_BF16, _BF16), (_BF16, _FP8))
"""Types of activations and of pages."""
ATTENTION = (
    (_F32, _F32, 8, 1),
    (_F32, _F32, 64, 3),
    (_F32, _F16, 80, 4),
    (_F32, _FP8, 64, 3),
    (_F16, _F16, 96, 2),
    (_F16, _FP8, 128, 8),
    (_BF16, _BF16, 128, 1),
    (_BF16, _FP8, 80, 7),
)
"""Both types, head_dim, and the query heads over a kv head."""

INSTANCES = (
    *(instance("norm", name, x) for name in ("rms_norm", "add_rms_norm") for x in X_TYPES),
    *(instance("activation", "silu_mul", x) for x in X_TYPES),
    *(instance("rotary", "rotary_and_store", *pair) for pair in KV_PAIRS),
    *(instance("attention_decode", "decode_attention", *numbers) for numbers in ATTENTION),
    *(instance("attention_decode", "combine_splits", x) for x in X_TYPES),
    *(instance("attention_prefill", "prefill_attention", *numbers[:3]) for numbers in ATTENTION),
    *(Kernel("gather", name) for name in ("gather_units", "scatter_units")),
    *(Kernel(name, f"{name}<{rows}>") for name in ("linear_int8", "linear_int4") for rows in (1, 2, 4, 8)),
)
"""Enough of the kernels to see every type, head size and way through them."""

_ERRORS = {
    1: "the arguments or threads are not the kernel's",
    2: "lanes wait for others of their warp, which never come",
    3: "an index beyond an array, a misaligned load, or an address that is nobody's",
}


class EmulatedLauncher:
    """Kernels of INSTANCES only, compiled when the first of their source is launched; they take CPU tensors.

    `backwards` turns the order in which warps and blocks run: what they compute must not depend on it.
    """

    def __init__(self, directory: Path) -> None:
        self.num_processors = 8
        self.backwards = False
        self._directory = directory
        self._loaded: dict[Kernel, Callable[..., int]] = {}

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], num_threads: int, *arguments: Argument) -> None:
        if kernel not in self._loaded:
            self._load(kernel.source)
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        kinds = "".join(_kind(argument) for argument in arguments)
        error = self._loaded[kernel](*grid, num_threads, kinds.encode(), pointers, int(self.backwards))
        if error:
            raise RuntimeError(f"{kernel.expression} in {grid} blocks of {num_threads}: {_ERRORS[error]}")

    def _load(self, source: str) -> None:
        kernels = [kernel for kernel in INSTANCES if kernel.source == source]
        exports = [f"EMULATED(kernel_{i}, {kernel.expression})" for i, kernel in enumerate(kernels)]
        code, library = self._directory / f"{source}.cpp", self._directory / f"{source}.so"
        code.write_text("\n".join([f'#include "{_SHIM}"', source_text(source), *exports, ""]), encoding="utf-8")
        assert GXX is not None
        done = subprocess.run([GXX, *_FLAGS, str(code), "-o", str(library)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        functions = ctypes.CDLL(str(library))
        for i, kernel in enumerate(kernels):
            self._loaded[kernel] = functions[f"kernel_{i}"]


def _kind(argument: Argument) -> str:
    if argument is None or isinstance(argument, torch.Tensor):
        return "p"
    return "i" if isinstance(argument, int) else "f"


def _value(argument: Argument) -> ctypes.c_uint64 | ctypes.c_int32 | ctypes.c_float:
    if argument is None:
        return ctypes.c_uint64(0)
    if isinstance(argument, torch.Tensor):
        assert argument.device.type == "cpu"
        return ctypes.c_uint64(argument.data_ptr())
    return ctypes.c_int32(argument) if isinstance(argument, int) else ctypes.c_float(argument)
