"""Whether one worker's state can become another's, by what the other says of itself: pages and ranks may differ and are
converted, what a row is made of may not. The two sidecars look at every byte of it again."""

from dataclasses import replace

from shared.protocol.messages import Geometry
from shared.runtime.errors import GeometryMismatch
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout
from shared.state.remap import ShardedState


def misfit(ours: PoolLayout, theirs: Geometry) -> str | None:
    """Why our state can never become theirs; None where it can."""
    whole = ours.components if ours.shard is None else ours.shard.whole
    names = tuple(component.name for component in whole)
    if theirs.components != names:
        return f"state components differ: prefill {', '.join(names)}; decode {', '.join(theirs.components)}"
    paged = tuple(replace(c, unit_tokens=theirs.page_tokens) if c.index is IndexKind.PAGE else c for c in whole)
    try:
        cut = ShardedState(paged, theirs.tp_size).of_rank(0)
    except GeometryMismatch as error:
        return error.message
    for component, size in zip(cut, theirs.unit_bytes, strict=False):
        if component.unit_bytes != size:
            return f"component {component.name}: a unit has {size} bytes at decode, not {component.unit_bytes}"
    return None if len(theirs.unit_bytes) == len(cut) else "a size is missing"
