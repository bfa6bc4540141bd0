"""Three workers' sides of a link: a sender whose transfer is aborted, a second one whose bytes take its place, and the
receiver whose pool shows what was written."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shared.protocol.reports import LinkAddress
from shared.transfer.link import Piece, Receipt, TicketKey
from shared.transfer.sidecar_options import SidecarOptions
from tests.contract.transfer_links import Pair, Side, Units, expected_pool, new_ticket, sidecar_side

TABLE = ((3, 4, 9, 1, 20), (3, 4, 9, 1, 20), (2,), (5,))
PIECES = (
    Piece(0, 0, (7, 8, 2, 0, 23), 3),
    Piece(1, 0, (7, 8, 2, 0, 23), 3),
    Piece(2, 0, (4,), 1),
    Piece(3, 0, (0,), 5),
)
OTHERS = (
    Piece(0, 0, (1, 9, 10, 11, 12), 4),
    Piece(1, 0, (5, 6, 13, 14, 15), 4),
    Piece(2, 0, (1,), 1),
    Piece(3, 0, (3,), 8),
)
"""What the other ticket brings: from other pages of another sender, all rows."""
ELSEWHERE = ((2, 6, 7, 8, 10), (2, 6, 7, 8, 10), (4,), (1,))
LAYER_S = 0.3
"""How long a layer of a slow transfer takes; there are nine."""


@dataclass
class Trio:
    """slow: its transfer is aborted. other: a second sender, whose bytes come next. Both send to `receiver`."""

    kind: str
    slow: Side
    other: Side
    receiver: Side

    @property
    def sides(self) -> tuple[Side, Side, Side]:
        return self.slow, self.other, self.receiver

    async def open(self, table: Units = TABLE) -> tuple[TicketKey, bytes, asyncio.Event]:
        """A ticket over these pages, with an event for its first bytes."""
        key, secret = new_ticket()
        first = asyncio.Event()
        await self.receiver.link.open(key, secret, table, lambda _key: first.set())
        return key, secret, first

    async def other_ticket(self) -> "Other":
        """The same pages, reserved and filled for somebody else."""
        key, secret, _ = await self.open()
        self.receiver.poison()
        await self.other.link.send(key, secret, self.receiver.link.address, OTHERS)
        other = Other(self, key, expected_pool(Pair(self.kind, self.other, self.receiver), TABLE, OTHERS))
        await other.check()
        return other

    async def attempt(self, key: TicketKey, secret: bytes, to: LinkAddress | None = None) -> Exception | None:
        """The slow sender's transfer; how it ended."""
        try:
            await self.slow.link.send(key, secret, to or self.receiver.link.address, PIECES)
        except Exception as error:
            return error
        return None


async def until_whole(trio: Trio, to: LinkAddress | None = None) -> TicketKey:
    """The ticket of a transfer that came through. Where the machine itself stands still for longer than the sidecars'
    patience, one may fail."""
    async with asyncio.timeout(120):
        while True:
            trio.receiver.poison()
            key, secret, _ = await trio.open()
            if await trio.attempt(key, secret, to) is None:
                return key
            await trio.receiver.link.fence(key)
            await trio.slow.link.forget(key)


@dataclass
class Other:
    trio: Trio
    key: TicketKey
    pool: np.ndarray

    async def check(self) -> None:
        """Its bytes are there and nothing else was written, and both sidecars say the same of them."""
        receiver = self.trio.receiver
        assert (receiver.pool == self.pool).all()
        assert await receiver.link.received(self.key) == await self.trio.other.link.sent(self.key)

    async def end(self) -> None:
        await self.trio.receiver.link.fence(self.key)
        await self.trio.other.link.forget(self.key)


async def make_trio(
    kind: str,
    directory: Path,
    *,
    slow: bool,
    flags: tuple[str, ...] = (),
    apart: AbstractContextManager[None] | None = None,
    receiver_host: str | None = None,
) -> Trio:
    """slow: over TCP the sender is the slow one, else the receiver, who copies or reads. apart: where the first
    sender's process is started; the two others are started where the caller is."""
    options = SidecarOptions("s", directory, transfer=kind, arguments=flags, fence_timeout_s=3.0)
    dragging = replace(options, arguments=(*flags, "--faults", f"transfer.delay_s={LAYER_S}")) if slow else options
    with apart or nullcontext():
        sender = await sidecar_side(replace(dragging if kind == "tcp" else options, name="sender"))
    other, receiver = await asyncio.gather(
        sidecar_side(replace(options, name="other")),
        sidecar_side(replace(dragging if kind != "tcp" else options, name="receiver", tcp_host=receiver_host)),
    )
    sender.scramble()
    other.scramble()
    return Trio(kind, sender, other, receiver)


def pid(side: Side) -> int:
    number = side.link.pid  # type: ignore[union-attr]
    assert number is not None
    return number


async def receipt_of_a_whole_transfer(trio: Trio) -> Receipt:
    """What P would sign for PIECES of the slow sender."""
    key, secret, _ = await trio.open()
    assert await trio.attempt(key, secret) is None
    receipt = await trio.slow.link.sent(key)
    await trio.receiver.link.fence(key)
    await trio.slow.link.forget(key)
    return receipt
