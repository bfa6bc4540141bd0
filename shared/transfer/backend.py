"""What a link backend is: it moves the units of a manifest to one peer and decides nothing.

A backend has two halves. Its *listener* serves peers that connect (see `listener.py`; every check is the door's). Its
*channels* are connections to one incarnation of one peer. Everything blocks and runs in threads, so that moving bytes
never holds an event loop.
"""

from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np

from shared.protocol.reports import LinkAddress
from shared.state.remap import Fit
from shared.transfer.link import Piece, TicketKey

Digests = list[list[np.ndarray]]
"""xxh3-128 by piece and layer: [units, 16] bytes."""


@dataclass(slots=True)
class Wire:
    """How the rows of a transfer travel. wanted: the format that both sides agreed on. The rest is entered by a channel
    that codes; a way that gains nothing by it moves rows as they are. used: format and bytes of each component that was
    coded. bytes_per_s: of the link, where enough went over it to tell."""

    wanted: str = "raw"
    used: dict[int, tuple[str, int]] = field(default_factory=dict)
    bytes_per_s: float | None = None

    def add(self, component: int, name: str, num_bytes: int) -> None:
        self.used[component] = name, num_bytes + self.used.get(component, (name, 0))[1]


class Turn(Protocol):
    """When a transfer may send: a backend asks before each burst, so that what is more urgent waits for one at most.
    burst_bytes: longest burst. window_bytes: what may be on its way at most, as far as the backend can tell; 0: any."""

    @property
    def burst_bytes(self) -> int: ...

    @property
    def window_bytes(self) -> int: ...

    def wait(self, num_bytes: int) -> None:
        """Blocks until the next burst may be sent; the one before is over. TransferError if the transfer is aborted."""

    def at_once(self, num_bytes: int) -> bool:
        """As `wait`, without blocking: False if it cannot be sent now."""

    def abort(self) -> None:
        """From any thread: whoever waits, now or later, gets a TransferError."""


class _Always:
    burst_bytes = 4 << 20
    window_bytes = 0

    def wait(self, num_bytes: int) -> None: ...

    def at_once(self, num_bytes: int) -> bool:
        return True

    def abort(self) -> None: ...


ALWAYS: Turn = _Always()


@dataclass(frozen=True, slots=True)
class Manifest:
    """One transfer: the right to make it, what to move, and when."""

    key: TicketKey
    secret: bytes
    pieces: tuple[Piece, ...]
    wire: Wire = field(default_factory=Wire)
    turn: Turn = ALWAYS


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
    corrupt: the receiver spoils the first byte of each component it writes. undigested: over shm both sides leave the
    digests out, which shows what they cost."""

    delay_s: float = 0.0
    corrupt: bool = False
    undigested: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Out of a list such as `transfer.delay_s=0.05,transfer.corrupt=1`; points of other parts are skipped."""
        pairs = [entry.strip().partition("=") for entry in text.split(",")]
        given = {name.removeprefix("transfer."): value for name, _, value in pairs if name.startswith("transfer.")}
        if unknown := set(given) - {"delay_s", "corrupt", "undigested"}:
            raise ValueError(f"no such fault: transfer.{unknown.pop()}")
        corrupt, undigested = (given.get(name, "0") == "1" for name in ("corrupt", "undigested"))
        return cls(float(given.get("delay_s", "0")), corrupt, undigested)


class Begun(Protocol):
    """A transfer that the peer has been told of."""

    def poll(self, wait_s: float) -> Digests | None:
        """What `transfer` returns, or None if it is not confirmed within `wait_s`, during which the thread stays
        awake. Raises what `transfer` does."""

    def finish(self) -> Digests:
        """Blocks for it."""


class Channel(Protocol):
    """A connection to one boot of one peer. One transfer at a time; after any error it can only be closed. fit: where
    our state goes in the peer's, if that cuts it otherwise."""

    @property
    def fit(self) -> Fit | None: ...

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        """Blocks until the peer has confirmed that all of it landed, and returns the digests of the source bytes, of
        those pieces that go to this peer. No byte is read before `event` is set. Ends exactly once: with a result, or
        with a TransferError."""

    def begin(self, manifest: Manifest) -> Begun | None:
        """Starts a transfer whose source is complete, if it is so small that the peer is likely to be done before a
        thread could be woken for it; blocks for next to nothing. None: that is for `transfer`."""

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
