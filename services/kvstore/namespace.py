"""A namespace's memory: a pool with one block in a unit, and the sidecar that moves its bytes."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import xxhash

from shared.protocol.store_messages import NamespaceSpec
from shared.runtime.errors import InvalidRequest
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout
from shared.store.namespaces import bytes_of_blocks, layout_of, name_of
from shared.transfer.link import Piece, TicketKey
from shared.transfer.pool import Pool, create_pool
from shared.transfer.sidecar_link import SidecarLink
from shared.transfer.sidecar_options import SidecarOptions

OnLost = Callable[[tuple[TicketKey, ...]], None]


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """memory_bytes: for the blocks of one namespace. sidecar: of the first namespace; its ports, where it is given any,
    are those after them for the others. ipc_dir: where its sockets lie."""

    memory_bytes: int
    sidecar: SidecarOptions

    @property
    def ipc_dir(self) -> Path:
        return self.sidecar.ipc_dir


@dataclass(slots=True, eq=False)
class Namespace:
    """Made by `open`; `close` ends the sidecar. number: no two that are open have the same."""

    name: str
    layout: PoolLayout
    link: SidecarLink
    pool: Pool
    fd: int
    number: int

    @classmethod
    async def open(cls, spec: NamespaceSpec, settings: MemorySettings, number: int, on_lost: OnLost) -> Self:
        """Starts its sidecar. Raises InvalidRequest for what can have no pool here, PeerLost where the sidecar does not
        come up. on_lost: these puts' tickets will never fill."""
        name, num_units = name_of(spec), num_units_of(spec, settings.memory_bytes)
        layout = layout_of(spec, num_units)
        options = _options_of(settings.sidecar, number)
        fd = create_pool(layout)
        try:
            pool = Pool.map(fd, layout, writable=True)
            link = await SidecarLink.start(options, fd, layout, on_lost=on_lost)
        except BaseException:
            os.close(fd)
            raise
        return cls(name, layout, link, pool, fd, number)

    async def close(self) -> None:
        await self.link.close()
        os.close(self.fd)

    @property
    def block_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in bytes_of_blocks(self.layout, 1))

    @property
    def block_tokens(self) -> int:
        return self.layout.page_tokens

    def tables(self, units: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """A ticket's tables: its k-th block goes to the k-th of these units, and nothing else is let in."""
        return tuple(tuple(units) if c.index is IndexKind.PAGE else () for c in self.layout.components)

    def pieces(self, units: Sequence[int], first_block: int) -> tuple[Piece, ...]:
        """Whole blocks for a ticket in which `first_block` others come before them."""
        paged = (k for k, c in enumerate(self.layout.components) if c.index is IndexKind.PAGE)
        return tuple(Piece(k, first_block, tuple(units), self.block_tokens) for k in paged)

    def parts(self, unit: int) -> list[memoryview]:
        """A block's bytes: component by component, layer by layer. They are the pool's own."""
        found = []
        for k, component in enumerate(self.layout.components):
            if component.index is IndexKind.PAGE:
                plane = self.pool.plane(k)
                starts = (plane.base(layer) + unit * plane.unit_bytes for layer in range(plane.num_layers))
                found += [self.pool.bytes[start : start + plane.unit_bytes] for start in starts]
        return found

    async def digests(self, units: Sequence[int]) -> list[bytes]:
        """xxh3-128 over each block's bytes. Nobody may write them meanwhile."""
        return await asyncio.to_thread(lambda: [self._digest(unit) for unit in units])

    def _digest(self, unit: int) -> bytes:
        hasher = xxhash.xxh3_128()
        for part in self.parts(unit):
            hasher.update(part)
        return hasher.digest()


def num_units_of(spec: NamespaceSpec, memory_bytes: int) -> int:
    """How many blocks the memory holds; InvalidRequest where that is none."""
    num_bytes = sum(num_bytes for _, num_bytes in bytes_of_blocks(layout_of(spec, 1), 1))
    if num_bytes > memory_bytes:
        raise InvalidRequest(f"a block of {num_bytes} bytes does not go into memory_mib ({memory_bytes} bytes)")
    return memory_bytes // num_bytes


def _options_of(options: SidecarOptions, number: int) -> SidecarOptions:
    def later(port: int | None) -> int | None:
        return port + number if port else port

    name = f"{options.name[:36]}-{number}" if number else options.name
    return replace(options, name=name, tcp_port=later(options.tcp_port), nixl_port=later(options.nixl_port))
