"""What a peer, a client or a broken disk makes us say over and over is said a few times and then counted, so that
nobody can fill a log from outside."""

import logging
import time
from collections.abc import Callable

_BURST = 10
_PERIOD_S = 10.0


class RepeatLimit(logging.Filter):
    """Lets `burst` warnings of one line of code pass in `period_s`, and after that one that says how many were left
    out. Its memory is bounded by the number of such lines."""

    def __init__(
        self, burst: int = _BURST, period_s: float = _PERIOD_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._burst, self._period_s, self._now = burst, period_s, now
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}
        """Line of code -> (when its period began, records in it)."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        where, now = (record.pathname, record.lineno), self._now()
        began, count = self._seen.get(where, (now, 0))
        if now - began >= self._period_s:
            left_out = max(0, count - self._burst)
            began, count = now, 0
            if left_out:
                record.msg, record.args = f"{record.getMessage()} [and {left_out} times more since]", None
        self._seen[where] = began, count + 1
        return count < self._burst
