"""What the door gives a transfer that it lets in, and what it says to one that it does not."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from shared.runtime.errors import TransferRefused
from shared.state.remap import Fit
from shared.transfer.link import TicketKey
from shared.transfer.pool import Run
from shared.transfer.wire import WirePiece


class Refused(TransferRefused):
    """Turned away at the door. `reason` is one word, for counters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Stop:
    """A threading.Event for one waiter, who seldom comes: making a real one takes longer than a small copy."""

    __slots__ = ("_event", "_set")

    def __init__(self) -> None:
        self._set = False
        self._event: threading.Event | None = None

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        if self._event is not None:
            self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        event = self._event = threading.Event()
        if self._set:  # maybe before anybody could see the event
            event.set()
        return event.wait(timeout)


@dataclass(slots=True, eq=False)
class Grant:
    """A transfer that was let in. It must look at `stopped` between writes and end soon after it is set. pieces: in the
    sender's units. runs: in ours; with a fit all that the rows of a piece lie in. held_len: the rows of so many
    positions are here already and stay as they are, though a unit of the sender's may bring some along."""

    key: TicketKey
    backend: str
    pieces: tuple[WirePiece, ...]
    runs: tuple[Run, ...]
    stopped: Stop
    stop: Callable[[], None]
    fit: Fit | None = None
    wire_format: str = "raw"
    held_len: int = 0
