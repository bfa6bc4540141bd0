"""What is remembered of tickets that ended: bounded in number and time, so that late messages get a clear answer and
can never resurrect anything, and a flood of them costs nothing."""

from collections import OrderedDict
from typing import Generic, TypeVar

from shared.runtime.clock import Clock

V = TypeVar("V")


class Tombstones(Generic[V]):
    """room -> what to answer about it. The oldest go first when `capacity` is reached or `keep_s` has passed."""

    def __init__(self, clock: Clock, capacity: int = 4096, keep_s: float = 600.0) -> None:
        self._clock = clock
        self._capacity = capacity
        self._keep_s = keep_s
        self._entries: OrderedDict[int, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, room: int, value: V) -> None:
        self._entries.pop(room, None)
        self._entries[room] = (self._clock.now(), value)
        self._sweep()

    def get(self, room: int) -> V | None:
        self._sweep()
        entry = self._entries.get(room)
        return None if entry is None else entry[1]

    def _sweep(self) -> None:
        oldest_kept = self._clock.now() - self._keep_s
        while self._entries:
            made_at, _ = next(iter(self._entries.values()))
            if len(self._entries) <= self._capacity and made_at >= oldest_kept:
                return
            self._entries.popitem(last=False)
