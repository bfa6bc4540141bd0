"""The wire formats by name, and which of them loses more.

Wherever state is kept for other requests, its key has to carry the lossiest format among its ancestors (`lossiest`), so
that what came by a lossy format is never taken for what an exact request computes (`serves`).
"""

import logging
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

from shared.state.components import StateComponent
from shared.transfer.formats.base import WireFormat
from shared.transfer.formats.block import is_lossy_input

_log = logging.getLogger(__name__)
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


def offered(names: str) -> tuple[str, ...]:
    """Those of a list such as `raw,lossless` that this process can speak, and EXACT in any case; all, where the list is
    empty. Raises ValueError for a name that no format has."""
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    if unknown := wanted - set(LOSSINESS):
        raise ValueError(f"no wire format is called {min(unknown)}; there are {', '.join(LOSSINESS)}")
    return tuple(name for name in available() if not wanted or name in wanted or name == EXACT)


def travels_as(name: str, component: StateComponent) -> str:
    """The name of `format_for` these two; imports nothing."""
    if name in (EXACT, DEFAULT):
        return name
    fits = is_lossy_input(component) and (name != "fp16" or component.dtype == "float32")
    return name if fits else DEFAULT


def format_named(name: str) -> WireFormat:
    """Raises KeyError for a name that no format has. The first call for a name imports it."""
    cls = _CLASSES[name]
    chosen: WireFormat = getattr(import_module(f"shared.transfer.formats.{name}"), cls)()
    return chosen


def load_formats(names: Iterable[str]) -> None:
    """Imports them, which takes a second where something has to be compiled, so that no transfer waits for it."""
    for name in names:
        try:
            format_named(name)
        except Exception:
            # A transfer that comes in this format will fail, and others go on.
            _log.exception("the wire format %s cannot be used", name)


def format_for(name: str, component: StateComponent) -> WireFormat:
    """What a component travels as where `name` was agreed on: the default where that format does not take it."""
    return format_named(travels_as(name, component))


def lossiest(names: Iterable[str]) -> str:
    """What a key remembers of the formats that a block and its ancestors came by; EXACT where none lost anything."""
    worst = max((LOSSINESS[name] for name in names), default=0)
    return next(name for name, place in LOSSINESS.items() if place == worst)


def serves(held: str, wanted: str) -> bool:
    """Whether state that came by `held` may serve a request that accepts `wanted`."""
    return LOSSINESS[held] <= LOSSINESS[wanted]
