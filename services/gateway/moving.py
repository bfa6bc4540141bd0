"""Streams leave a decode worker that is told to end: each goes on elsewhere, as after a loss, but while all is well.

One at a time, so that each stands still for its own move and for no other's; and soon after a block of it was stored,
so that little has to be computed again. Who finds no other place stays to the end.
"""

from services.gateway.router import Demand, could_fit, has_room
from services.gateway.workers import WorkerRegistry
from shared.runtime.clock import Clock
from shared.runtime.errors import BatonError

_SHORT_TAIL = 12
"""Positions that are as good as none."""
_PATIENCE_S = 3.0
"""So long a stream waits for its next block to be stored. Workers are given a few times that to end."""


class Draining(BatonError):
    """The worker that serves a stream is about to end, and another one can take it over. Never reaches a client."""

    code = "draining"
    retryable = True


class Moves:
    """Of one gateway. is_on: whether streams are moved at all."""

    def __init__(self, registry: WorkerRegistry, clock: Clock, *, is_on: bool) -> None:
        self._registry = registry
        self._clock = clock
        self._is_on = is_on
        self._under_way: object | None = None

    def may_begin(self, who: object, worker: str, demand: Demand, stored: int, told_at: float) -> bool:
        """True: `who` is on its way from now on until `ended`. stored: positions that the stores have. told_at: when it
        was known that the worker is about to end."""
        if not self._is_on or self._under_way is not None:
            return False
        if demand.prompt_len - stored > _SHORT_TAIL and self._clock.now() - told_at < _PATIENCE_S:
            return False
        others = [w for w in self._registry.ready("decode") if w.report.identity == demand.identity]
        if not any(w.peer != worker and could_fit(w, demand) and has_room(w, demand) for w in others):
            return False
        self._under_way = who
        return True

    def ended(self, who: object) -> None:
        """It has its next token, or ended itself. Harmless where it was not on its way."""
        if self._under_way is who:
            self._under_way = None
