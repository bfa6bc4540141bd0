"""When a process does not end by itself: a thread that computes, or waits for a disk, cannot be cancelled."""

import logging
import os
import threading

log = logging.getLogger(__name__)


def exit_within(timeout_s: float, status: int, why: str = "") -> threading.Timer:
    """Ends the whole process after `timeout_s` with `status`, whatever still runs in it, unless the timer that is
    returned is cancelled before. why: what the log says then."""

    def end() -> None:
        if why:
            log.critical("%s", why)
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(status)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    return timer
