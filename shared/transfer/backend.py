"""What a link backend is: it moves the units of a manifest to one peer and decides nothing.

A backend has two halves. Its *listener* serves peers that connect (see `listener.py`; every check is the door's). Its
*channels* are connections to one incarnation of one peer. Everything blocks and runs in threads, so that moving bytes
never holds an event loop.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from shared.protocol.messages import LinkAddress
from shared.transfer.link import Piece, TicketKey

Digests = list[list[np.ndarray]]
"""xxh3-128 by piece and layer: [units, 16] bytes."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One transfer: the right to make it, and what to move."""

    key: TicketKey
    secret: bytes
    pieces: tuple[Piece, ...]


class Event(Protocol):
    """Says when the source is complete; threading.Event is one."""

    def wait(self, timeout: float | None = None) -> bool: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """connect_s: until a peer counts as not there. stall_s: how long nothing may move before a transfer fails."""

    connect_s: float = 3.0
    stall_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Faults:
    """Injected failures, for tests only. delay_s: pause before each layer (tcp: of the sender, else of the receiver).
    corrupt: the receiver spoils the first byte of each component it writes."""

    delay_s: float = 0.0
    corrupt: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Out of a list such as `transfer.delay_s=0.05,transfer.corrupt=1`; points of other parts are skipped."""
        pairs = [entry.strip().partition("=") for entry in text.split(",")]
        given = {name.removeprefix("transfer."): value for name, _, value in pairs if name.startswith("transfer.")}
        if unknown := set(given) - {"delay_s", "corrupt"}:
            raise ValueError(f"no such fault: transfer.{unknown.pop()}")
        return cls(float(given.get("delay_s", "0")), given.get("corrupt", "0") == "1")


class Channel(Protocol):
    """A connection to one boot of one peer. One transfer at a time; after any error it can only be closed."""

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        """Blocks until the peer has confirmed that all of it landed, and returns the digests of the source bytes. No
        byte is read before `event` is set. Ends exactly once: with a result, or with a TransferError."""

    def abort(self) -> None:
        """From any thread: makes a transfer under way fail at once."""

    def is_idle(self) -> bool:
        """Whether a channel not in use may be used again."""

    def close(self) -> None: ...


class Backend(Protocol):
    """Registered with a pool and a door when it is made."""

    name: str

    def reaches(self, peer: LinkAddress) -> bool:
        """Whether it is worth trying to connect to `peer`."""

    def connect(self, peer: LinkAddress) -> Channel:
        """Blocks. Raises PeerLost if the peer, in this very incarnation, is not there, TransferRefused if it does not
        want us."""

    def close(self) -> None:
        """Ends the listener and every connection it serves; returns when their threads have ended. Channels are closed
        by who opened them."""
