"""Whether one worker's state can become another's, by what the other says of itself: pages may differ and are
converted, what a row is made of may not. The two sidecars look at every byte of it again."""

from dataclasses import replace

from shared.protocol.reports import Geometry
from shared.runtime.errors import GeometryMismatch
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout


def check_geometry(ours: PoolLayout, theirs: Geometry) -> None:
    """Raises GeometryMismatch, naming what differs, where our state can never become theirs; also where several ranks
    share either's, since a destination names the link of one."""
    names = tuple(component.name for component in ours.components)
    if theirs.components != names:
        raise GeometryMismatch(
            f"state components differ: prefill {', '.join(names)}; decode {', '.join(theirs.components)}"
        )
    if max(ours.tp_size, theirs.tp_size) > 1:
        raise GeometryMismatch(
            f"{ours.tp_size} rank(s) share the state at prefill and {theirs.tp_size} at decode: "
            "only workers of one rank hand over to each other"
        )
    for component, size in zip(ours.components, theirs.unit_bytes, strict=False):
        is_page = component.index is IndexKind.PAGE
        needed = replace(component, unit_tokens=theirs.page_tokens) if is_page else component
        if needed.unit_bytes != size:
            raise GeometryMismatch(
                f"component {component.name}: a unit has {size} bytes at decode, not {needed.unit_bytes}"
            )
    if len(theirs.unit_bytes) != len(ours.components):
        raise GeometryMismatch(f"{len(theirs.unit_bytes)} sizes at decode for {len(ours.components)} components")
