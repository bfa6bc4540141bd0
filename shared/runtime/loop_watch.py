"""Says where an event loop stands still. Such a process answers no /health and sends no reports, so others see that
something is wrong; this is how its log says what."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

log = logging.getLogger(__name__)

_BEAT_S = 0.5


class LoopWatch:
    """A thread that looks whether the loop comes round. on_stall is called in that thread, once for each standstill of
    more than `limit_s`. Made and closed on the loop."""

    def __init__(self, on_stall: Callable[[], None], limit_s: float = 10.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_stall, self._limit_s = on_stall, limit_s
        self._watched = threading.get_ident()
        self._closing = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join()

    def _beat(self) -> None:
        self._beaten_at = time.monotonic()
        self._timer = self._loop.call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
        told_of = 0.0
        looked_at = time.monotonic()
        while not self._closing.wait(min(_BEAT_S, self._limit_s / 4)):
            now, beaten_at = time.monotonic(), self._beaten_at
            stood_still_ourselves, looked_at = now - looked_at > self._limit_s / 2, now
            if now - beaten_at > self._limit_s and beaten_at != told_of and not stood_still_ourselves:
                told_of = beaten_at
                frame = sys._current_frames().get(self._watched)
                where = "".join(traceback.format_stack(frame)) if frame is not None else "nowhere\n"
                log.warning("the event loop has stood still for %.0f s, in\n%s", now - beaten_at, where.rstrip())
                self._on_stall()
