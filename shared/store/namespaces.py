"""What a namespace is made of, as it goes over the wire and as it lies in a pool: a worker's components with pages of
one block each. So one unit of the kvstore's pool is one block, and the data plane regroups a worker's smaller pages.
"""

import hashlib
import json
from dataclasses import replace

from shared.protocol.store_messages import ComponentSpec, NamespaceSpec
from shared.runtime.errors import InvalidRequest
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout

_VERSION = 1


def spec_of(identity: str, layout: PoolLayout, block_tokens: int) -> NamespaceSpec:
    """Of a worker's state; of the whole of it, where the worker's pool has a share."""
    whole = layout.components if layout.shard is None else layout.shard.whole
    paged = (replace(c, unit_tokens=block_tokens) if c.index is IndexKind.PAGE else c for c in whole)
    components = tuple(
        ComponentSpec(
            name=c.name,
            index=c.index.value,
            unit_tokens=c.unit_tokens,
            outer=c.outer,
            inner=c.inner,
            dtype=c.dtype,
            layers=c.layers,
            shard_axis=c.shard_axis,
        )
        for c in paged
    )
    return NamespaceSpec(identity=identity, block_tokens=block_tokens, components=components)


def name_of(spec: NamespaceSpec) -> str:
    """Equal for equal namespaces, on every machine and in every version: it is kept with the blocks."""
    parts = [
        [c.name, c.index, c.unit_tokens, list(c.outer), list(c.inner), c.dtype, list(c.layers), c.shard_axis]
        for c in spec.components
    ]
    text = json.dumps([_VERSION, spec.identity, spec.block_tokens, parts], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def layout_of(spec: NamespaceSpec, num_units: int) -> PoolLayout:
    """A pool of so many blocks. Raises InvalidRequest for what is no state, or has no pages."""
    try:
        components = tuple(
            StateComponent(
                name=c.name,
                index=IndexKind(c.index),
                unit_tokens=c.unit_tokens,
                outer=c.outer,
                inner=c.inner,
                dtype=c.dtype,
                layers=c.layers,
                shard_axis=c.shard_axis,
            )
            for c in spec.components
        )
        sizes = [component.unit_bytes for component in components]
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"not the components of any state: {error}") from error
    paged = [c for c in components if c.index is IndexKind.PAGE]
    if not paged or any(c.unit_tokens != spec.block_tokens for c in paged):
        raise InvalidRequest("a namespace has components in pages of one block each")
    if min(sizes) < 1:
        raise InvalidRequest("a component has no bytes")
    return PoolLayout(components, num_units, num_slots=0)


def bytes_of_blocks(layout: PoolLayout, num_blocks: int) -> list[tuple[str, int]]:
    """What so many blocks are, by component: what a receipt of theirs must say."""
    return [
        (c.name, num_blocks * c.unit_bytes * c.num_layers if c.index is IndexKind.PAGE else 0)
        for c in layout.components
    ]
