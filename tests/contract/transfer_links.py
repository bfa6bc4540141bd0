"""Pairs of links over pools of their own, for every kind of link there is."""

import asyncio
import mmap
import os
import secrets
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from shared.runtime.backend_names import NIXL_PACKAGES
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.fake import FakeLink, FakeNetwork, Mishap
from shared.transfer.link import Piece, TicketKey
from shared.transfer.pool import create_pool
from shared.transfer.sidecar_link import SidecarLink
from shared.transfer.sidecar_options import SidecarOptions

NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(
        not any(find_spec(package) for package in NIXL_PACKAGES),
        reason="nixl is not installed, and needs a package of its own: pip install -e '.[nixl]'",
    ),
)
POISON = 0xA5
LAYOUT = PoolLayout(
    (
        StateComponent("kv", IndexKind.PAGE, 4, (2, 3), (5,), "float32", (0, 1, 2)),
        StateComponent("index", IndexKind.PAGE, 4, (), (7,), "uint8", (0, 2)),
        StateComponent("pending", IndexKind.REQUEST, 1, (2,), (9,), "float32", (0, 1, 2)),
        StateComponent("window", IndexKind.RING, 8, (2,), (3,), "float16", (1,)),
    ),
    num_pages=24,
    num_slots=6,
)
Units = tuple[tuple[int, ...], ...]
AnyLink = SidecarLink | FakeLink


@dataclass
class Side:
    """A worker as far as links know it: its pool, and the link."""

    link: AnyLink
    layout: PoolLayout
    pool: np.ndarray
    fd: int = -1
    lost: list[TicketKey] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)

    def component(self, index: int) -> np.ndarray:
        return self.layout.view(memoryview(self.pool), index)

    def scramble(self) -> None:
        """Fresh random state everywhere."""
        self.pool[:] = np.frombuffer(secrets.token_bytes(len(self.pool)), dtype=np.uint8)

    def poison(self) -> None:
        self.pool[:] = POISON

    async def counters(self) -> dict[str, int]:
        return self.link.counters if isinstance(self.link, FakeLink) else await self.link.counters()

    async def close(self) -> None:
        await self.link.close()
        if self.fd >= 0:
            os.close(self.fd)


@dataclass
class Pair:
    """kind: fake, shm, tcp or nixl. Faults are those of both sides."""

    kind: str
    sender: Side
    receiver: Side

    async def close(self) -> None:
        await self.sender.close()
        await self.receiver.close()


@dataclass(frozen=True)
class Wanted:
    delay_s: float = 0.0
    corrupt: bool = False
    wire_formats: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        given = [f"transfer.delay_s={self.delay_s}"] * bool(self.delay_s) + ["transfer.corrupt=1"] * self.corrupt
        faults = ("--faults", ",".join(given)) if given else ()
        return (*faults, "--wire-formats", self.wire_formats) if self.wire_formats else faults


async def sidecar_side(options: SidecarOptions, layout: PoolLayout = LAYOUT) -> Side:
    fd = create_pool(layout)
    pool = np.frombuffer(mmap.mmap(fd, layout.total_bytes), dtype=np.uint8)
    lost: list[TicketKey] = []
    restarts: list[str] = []
    link = await SidecarLink.start(options, fd, layout, lambda: restarts.append("up"), lost.extend)
    return Side(link, layout, pool, fd, lost, restarts)


def fake_side(network: FakeNetwork, layout: PoolLayout = LAYOUT) -> Side:
    buffer = bytearray(layout.total_bytes)
    return Side(FakeLink(network, layout, memoryview(buffer)), layout, np.frombuffer(buffer, dtype=np.uint8))


async def make_pair(
    kind: str, directory: Path, wanted: Wanted = Wanted(), receiver_layout: PoolLayout = LAYOUT
) -> Pair:
    """The receiver's pool may be cut differently. The slow side is the one whose fault slows that kind down."""
    if kind == "fake":
        network = FakeNetwork(lambda key, pieces: Mishap(layer_delay_s=wanted.delay_s, corrupt=wanted.corrupt))
        return Pair(kind, fake_side(network), fake_side(network, receiver_layout))
    options = SidecarOptions("s", directory, transfer=kind, arguments=wanted.flags)
    sender, receiver = await asyncio.gather(
        sidecar_side(replace(options, name="sender")), sidecar_side(replace(options, name="receiver"), receiver_layout)
    )
    return Pair(kind, sender, receiver)


def new_ticket() -> tuple[TicketKey, bytes]:
    return TicketKey(secrets.randbelow(1 << 62) + 1, 1), secrets.token_bytes(16)


def expected_pool(pair: Pair, table: Units, pieces: tuple[Piece, ...]) -> np.ndarray:
    """The receiver's pool, poisoned before, after `pieces` landed in the units of `table`; made without any code of
    the data plane."""
    buffer = np.full(len(pair.receiver.pool), POISON, dtype=np.uint8)
    for piece in pieces:
        component = LAYOUT.components[piece.component]
        source = pair.sender.component(piece.component)
        target = pair.receiver.layout.view(memoryview(buffer), piece.component)
        row_axis, whole = 1 + len(component.outer), piece.layers(component.num_layers)
        layers = slice(whole.start, whole.stop)
        for k, unit in enumerate(piece.units):
            last = k == len(piece.units) - 1
            rows = piece.rows_in_last if last else component.unit_tokens
            where = table[piece.component][piece.first_unit + k]
            cut = (slice(None),) * row_axis + (slice(0, rows),)
            target[layers, where][cut] = source[layers, unit][cut]
    return buffer
