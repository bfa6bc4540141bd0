"""Which block goes when there is no room: the one whose reuse is worth least. Pure: it is told the time.

    worth now = uses × cost ÷ size

uses: how often the block was put or found lately; a use counts half as much `half_life_s` later. cost: what computing
it again would take, in tokens; one deep in a prompt costs more, because attention looks at all tokens before it. size:
its bytes. All worths fade alike, so their order changes only with a use, and a heap may be ordered by the logarithm:

    rank = log2(uses × cost ÷ size) + time of the last use ÷ half life
"""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

HALF_LIFE_S = 600.0
ATTENTION_TOKENS = 4096
"""So many tokens before it double what a token costs: attention over them is then as much work as all the rest. Of the
right order for models of some billions of parameters."""
PINNED = 1e9
"""Added to the rank of what is softly pinned: it goes only where nothing else is left."""
AFTER_CHILDREN = 1e6
"""Added where its children are in memory: it may be read back from beneath, but chains go from their ends first."""


@dataclass(frozen=True, slots=True)
class Use:
    """How often a block was used, faded to the time `at` of the last use."""

    count: float
    at: float

    def again(self, now: float, half_life_s: float = HALF_LIFE_S) -> "Use":
        faded = self.count * 2.0 ** (-max(0.0, now - self.at) / half_life_s)
        return Use(1.0 + faded, max(now, self.at))


def recompute_cost(first_token: int, num_tokens: int) -> float:
    """Of tokens that have `first_token` others before them, in tokens without any."""
    return num_tokens * (1.0 + first_token / ATTENTION_TOKENS)


def rank(use: Use, cost: float, num_bytes: int, half_life_s: float = HALF_LIFE_S) -> float:
    """The lower, the sooner it goes."""
    return math.log2(use.count * cost / num_bytes) + use.at / half_life_s


class Order:
    """What may go, the least of it first. rank_of: the present rank of a key, None where it may not go now.

    A key must be named to `consider` whenever it may go from now on, or its rank has fallen; ranks that rise and keys
    that may not go any more are found out when it is their turn.
    """

    def __init__(self, rank_of: Callable[[bytes], float | None]) -> None:
        self._rank_of = rank_of
        self._heap: list[tuple[float, int, bytes]] = []
        self._queued: dict[bytes, tuple[float, int]] = {}
        self._numbers = itertools.count()

    def consider(self, key: bytes) -> None:
        found = self._rank_of(key)
        queued = self._queued.get(key)
        if found is not None and (queued is None or found < queued[0]):
            self._push(found, key)

    def least(self) -> bytes | None:
        """The key that goes next; it is in the order no more. None: nothing may go."""
        while self._heap:
            queued_rank, number, key = heapq.heappop(self._heap)
            if self._queued.get(key) != (queued_rank, number):
                continue  # queued anew meanwhile
            del self._queued[key]
            found = self._rank_of(key)
            if found is None:
                continue
            if found <= queued_rank:
                return key
            self._push(found, key)
        return None

    def _push(self, found: float, key: bytes) -> None:
        number = next(self._numbers)
        self._queued[key] = found, number
        heapq.heappush(self._heap, (found, number, key))
