"""Compiled copies and digests, where this process has what compiles them; without, plain Python does the same.

Loaded by name and late: images that hold no compiler move bytes too, and a sidecar is up before it has it.
"""

import importlib
import logging
from typing import Any, Protocol

import numpy as np

_log = logging.getLogger(__name__)


class Kernels(Protocol):
    """What `kernels.cpu.copy_runs` offers; see there."""

    def Units(
        self, data: np.ndarray, units: np.ndarray, unit_bytes: int, offset: int, layer_bytes: int, num_layers: int
    ) -> Any: ...

    def can_digest(self, unit_bytes: int) -> bool: ...

    def copy_units(self, target: Any, source: Any, first: int, limit_bytes: int) -> int: ...

    def copy_and_digest_units(
        self, target: Any, source: Any, digests: np.ndarray, first: int, limit_bytes: int
    ) -> int: ...

    def digest_units(self, source: Any, digests: np.ndarray, first: int, limit_bytes: int) -> int: ...


def load_kernels() -> Kernels | None:
    """Takes a second, and several the first time on a machine. None where they cannot be had."""
    try:
        found: Any = importlib.import_module("kernels.cpu.copy_runs")
    except ImportError as error:
        _log.info("pages are copied without compiled kernels: %s", error)
        return None
    except Exception:
        # No directory for what is compiled, or a processor that the compiler does not know: bytes move all the same.
        _log.exception("pages are copied without compiled kernels")
        return None
    kernels: Kernels = found
    return kernels
