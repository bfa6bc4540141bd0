"""Whether this machine has the vector instructions that packed weights are laid out for. Needs no torch."""

import functools
import platform
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba

from kernels.packing import VECTOR_FLAGS


@functools.cache
def has_vectors() -> bool:
    """Whether compiled kernels may use AVX2, fused multiply-add and half-precision conversion."""
    config: Any = numba.config
    told = config.CPU_NAME or config.CPU_FEATURES  # numba then compiles for another processor than this one
    if told or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    features = llvm.get_host_cpu_features()
    return all(features.get(name, False) for name in VECTOR_FLAGS)
