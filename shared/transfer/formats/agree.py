"""What a request may have its state sent as, and what two sidecars agree on. What was not asked for and loses something
is never agreed on, and refused where it comes all the same (`door.py`)."""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.protocol.messages import OnWire
from shared.protocol.wire import KvPrecision
from shared.transfer.formats.catalog import DEFAULT, EXACT, LOSSINESS

EXACT_FORMATS = tuple(name for name, place in LOSSINESS.items() if not place)


@dataclass(frozen=True, slots=True)
class Agreed:
    """instead: an exact format stands in for one that was asked for and that a side does not have."""

    name: str
    instead: bool = False


def accepted(precision: KvPrecision) -> tuple[str, ...]:
    """The formats that a request's state may come by."""
    if precision == "auto":
        return tuple(LOSSINESS)
    return EXACT_FORMATS if precision in EXACT_FORMATS else (*EXACT_FORMATS, precision)


def common(precision: KvPrecision, ours: Iterable[str], theirs: Iterable[str]) -> tuple[str, ...]:
    """Those of them that both sides have. What loses something leans on DEFAULT: not everything can travel so."""
    both = {EXACT, *ours} & {EXACT, *theirs}
    names = accepted(precision) if DEFAULT in both else EXACT_FORMATS
    return tuple(name for name in names if name in both)


def agree(precision: KvPrecision, ours: Iterable[str], theirs: Iterable[str]) -> Agreed:
    """For a precision that names a format."""
    both = common(precision, ours, theirs)
    if precision in both:
        return Agreed(precision)
    return Agreed(DEFAULT if DEFAULT in both else EXACT, instead=True)


def ran(on_wire: Iterable[OnWire]) -> str:
    """One name for how several components travelled: what lost most, else what was coded at all."""
    names = {one.wire_format for one in on_wire if one.num_bytes}
    return max(names, key=lambda name: (LOSSINESS[name], name != EXACT), default=EXACT)


def together(first: OnWire, second: OnWire) -> OnWire:
    """The same component of two transfers."""
    name = ran((first, second))
    return OnWire(name=first.name, wire_format=name, num_bytes=first.num_bytes + second.num_bytes)
