"""Bursts of a transfer whose bytes the peer fetches itself: the sender says when it may go on.

One byte for each burst, on the connection that the header came by. A transfer that nothing else waits beside is not
held back and has none.
"""

import time

from shared.runtime.errors import TransferRefused, TransferTimeout
from shared.transfer.connection import Connection
from shared.transfer.grant import Grant

PERMIT = b"."
_LOOK_S = 0.02
"""How soon a receiver that waits for a permit sees that its ticket was fenced."""


class Permits:
    """The receiver's account of one transfer. `num_bursts` of `burst_bytes` each; none: it may do all at once."""

    def __init__(self, connection: Connection, burst_bytes: int, num_bursts: int, stall_s: float) -> None:
        self._connection, self._burst_bytes, self._stall_s = connection, burst_bytes, stall_s
        self._to_come = num_bursts
        self._left: int | None = 0 if num_bursts else None

    def wait(self, grant: Grant) -> bool:
        """Returns when the next burst may be moved; False if the ticket is fenced. TransferRefused if it is fenced and
        permits are still to come, which nobody will read any more."""
        deadline = time.monotonic() + self._stall_s
        while not grant.stopped.is_set():
            if self._left is None or self._left > 0 or not self._to_come:
                return True
            came = len(self._connection.receive_within(self._to_come, _LOOK_S))
            self._to_come -= came
            self._left += came * self._burst_bytes
            if not came and time.monotonic() > deadline:
                raise TransferTimeout("the peer does not let its transfer go on")
        if self._to_come:
            raise TransferRefused("fenced: the ticket was fenced meanwhile")
        return False

    def spend(self, num_bytes: int) -> None:
        if self._left is not None:
            self._left -= num_bytes

    def settle(self, grant: Grant) -> None:
        """After the last burst: takes what permits are still to come, so that the next header follows."""
        while self._to_come:
            self._left = 0
            self.wait(grant)
