"""Who holds which unit of a pool. Pure bookkeeping of small integers: it knows neither bytes nor devices, so that the
machines, the engine and the tests can all count with the same thing. Slots are counted by it just like pages.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from shared.runtime.errors import PoolExhausted


class PageAllocator:
    """Units 0..num_units-1 with reference counts. Always hands out the lowest free ids, so runs stay long and a run of
    calls has one outcome. Invariant: `free + held == total`.

    Every reference belongs to an owner (any hashable); giving back what one does not hold raises ValueError.
    """

    def __init__(self, num_units: int) -> None:
        if num_units < 0:
            raise ValueError(f"a pool cannot have {num_units} units")
        self._total = num_units
        self._free = list(range(num_units))
        self._references = [0] * num_units
        self._owners: dict[Hashable, Counter[int]] = {}

    @property
    def total(self) -> int:
        return self._total

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        """Units with at least one reference."""
        return self._total - len(self._free)

    def take(self, count: int, owner: Hashable) -> list[int]:
        """`count` fresh units, one reference each; or PoolExhausted, having taken nothing."""
        if count < 0:
            raise ValueError(f"cannot take {count} units")
        if count > len(self._free):
            raise PoolExhausted(f"{count} units wanted, {len(self._free)} of {self._total} are free")
        units = [heapq.heappop(self._free) for _ in range(count)]
        self._add(units, owner)
        return units

    def share(self, units: Sequence[int], owner: Hashable) -> None:
        """One more reference to each of `units`, which somebody must hold. Raises ValueError and changes nothing if
        not."""
        for unit in units:
            if not self.is_held(unit):
                raise ValueError(f"unit {unit} is not held by anybody")
        self._add(units, owner)

    def give_back(self, units: Iterable[int], owner: Hashable) -> None:
        """Drops one reference a unit (a unit named twice: two). Units without references are free at once. Raises
        ValueError and changes nothing if the owner does not hold them."""
        dropped = Counter(units)
        mine = self._owners.get(owner, Counter())
        for unit, count in dropped.items():
            if mine[unit] < count:
                raise ValueError(f"{owner!r} gives back unit {unit} {count} times and holds it {mine[unit]} times")
        for unit, count in dropped.items():
            mine[unit] -= count
            if not mine[unit]:
                del mine[unit]
            self._references[unit] -= count
            if not self._references[unit]:
                heapq.heappush(self._free, unit)
        if not mine:
            self._owners.pop(owner, None)

    def give_back_all(self, owner: Hashable) -> None:
        """Drops every reference of `owner`; harmless where it has none."""
        mine = self._owners.get(owner)
        if mine:
            self.give_back(list(mine.elements()), owner)

    def is_held(self, unit: int) -> bool:
        return 0 <= unit < self._total and self._references[unit] > 0

    def num_references(self, unit: int) -> int:
        return self._references[unit]

    def held_by(self, owner: Hashable) -> int:
        """Different units `owner` holds."""
        return len(self._owners.get(owner, ()))

    def _add(self, units: Iterable[int], owner: Hashable) -> None:
        mine = self._owners.setdefault(owner, Counter())
        for unit in units:
            mine[unit] += 1
            self._references[unit] += 1
        if not mine:
            del self._owners[owner]
