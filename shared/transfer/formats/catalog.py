"""The wire formats by name, and which of them loses more.

A block's key carries the lossiest format among its ancestors, so that state which came by a lossy format is never taken
for what an exact request computes.
"""

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

from shared.state.components import StateComponent
from shared.transfer.formats.base import WireFormat

EXACT = "raw"
"""Under this name every exact format is one and the same in a key."""
DEFAULT = "lossless"
LOSSINESS = {"raw": 0, "lossless": 0, "fp16": 1, "int8": 2, "fp8": 3, "delta": 4}
"""Every format and its place, by the error that it left of the default model's keys and values: relative root mean
squares of 0, 0, 0.0002, 0.010, 0.022 and 0.08."""
_CLASSES = {name: name.capitalize() for name in LOSSINESS}
_NEEDS = {"lossless": "zstandard", "delta": "numba"}


def available() -> tuple[str, ...]:
    """The formats this process can speak, those that lose least first; images without numba lack `delta`."""
    return tuple(name for name in LOSSINESS if name not in _NEEDS or find_spec(_NEEDS[name]))


def format_named(name: str) -> WireFormat:
    """Raises KeyError for a name that no format has. The first call for a name imports it."""
    cls = _CLASSES[name]
    chosen: WireFormat = getattr(import_module(f"shared.transfer.formats.{name}"), cls)()
    return chosen


def format_for(name: str, component: StateComponent) -> WireFormat:
    """What a component travels as where `name` was agreed on: the default where that format does not take it."""
    chosen = format_named(name)
    return chosen if chosen.takes(component) else format_named(DEFAULT)


def lossiest(names: Iterable[str]) -> str:
    """What a key remembers of the formats that a block and its ancestors came by; EXACT where none lost anything."""
    worst = max((LOSSINESS[name] for name in names), default=0)
    return next(name for name, place in LOSSINESS.items() if place == worst)


def serves(held: str, wanted: str) -> bool:
    """Whether state that came by `held` may serve a request that accepts `wanted`."""
    return LOSSINESS[held] <= LOSSINESS[wanted]
