"""Memory of ended tickets is bounded in number and time."""

from collections.abc import Callable

from shared.runtime.clock import Timer
from shared.runtime.tombstones import Tombstones


class HandClock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    async def sleep(self, delay_s: float) -> None:
        self.at += delay_s

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        raise NotImplementedError


def test_the_oldest_go_first_when_there_are_too_many() -> None:
    stones: Tombstones[int] = Tombstones(HandClock(), capacity=100)
    for room in range(10_000):
        stones.put(room, room)
    assert len(stones) == 100
    assert stones.get(9_899) is None
    assert stones.get(9_900) == 9_900


def test_they_go_with_time_and_are_renewed_by_putting() -> None:
    clock = HandClock()
    stones: Tombstones[str] = Tombstones(clock, keep_s=10)
    stones.put(1, "a")
    stones.put(2, "b")
    clock.at = 6
    stones.put(1, "c")
    clock.at = 12
    assert (stones.get(1), stones.get(2), len(stones)) == ("c", None, 1)
