"""Who holds which unit of a pool. Pure bookkeeping of small integers: it knows neither bytes nor devices, so that the
machines, the engine and the tests can all count with the same thing. Slots are counted by it just like pages.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from shared.runtime.errors import PoolExhausted


class PageAllocator:
    """Units 0..num_units-1 with reference counts. Hands out the lowest free ids first, in order, so runs stay long and
    a run of calls has one outcome. Invariant: `free + held == total`.

    Every reference belongs to an owner (any hashable); giving back what one does not hold raises ValueError.

    A unit may have a *name*, which says what is in it. A free unit keeps its name, and can be adopted by it, until it
    is taken as a fresh one; those whose name was not used for longest go first, and last of all.
    """

    def __init__(self, num_units: int) -> None:
        if num_units < 0:
            raise ValueError(f"a pool cannot have {num_units} units")
        self._total = num_units
        self._free = list(range(num_units))
        self._references = [0] * num_units
        self._owners: dict[Hashable, Counter[int]] = {}
        self._named: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Free units with a name, the one that goes first at the front."""

    @property
    def total(self) -> int:
        return self._total

    @property
    def free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Units with at least one reference."""
        return self._total - self.free

    @property
    def num_named(self) -> int:
        return len(self._names)

    def take(self, count: int, owner: Hashable) -> list[int]:
        """`count` fresh units, one reference each; or PoolExhausted, having taken nothing."""
        if count < 0:
            raise ValueError(f"cannot take {count} units")
        if count > self.free:
            raise PoolExhausted(f"{count} units wanted, {self.free} of {self._total} are free")
        units = sorted(heapq.heappop(self._free) if self._free else self._take_idle() for _ in range(count))
        self._add(units, owner)
        return units

    def _take_idle(self) -> int:
        unit, _ = self._idle.popitem(last=False)
        del self._named[self._names.pop(unit)]
        return unit

    def name(self, unit: int, name: Hashable) -> None:
        """Says what is in a held unit. Nothing changes where it has a name, or another unit has this one: what is equal
        need not be found twice."""
        if not self.is_held(unit):
            raise ValueError(f"unit {unit} is not held by anybody")
        if name not in self._named and unit not in self._names:
            self._named[name], self._names[unit] = unit, name

    def find(self, name: Hashable) -> int | None:
        """The unit of that name."""
        return self._named.get(name)

    def adopt(self, units: Sequence[int], owner: Hashable) -> None:
        """One reference to each of `units`, which have a name, whether or not anybody holds them. Raises ValueError and
        changes nothing where one has none."""
        for unit in units:
            if unit not in self._names:
                raise ValueError(f"unit {unit} has no name")
        for unit in units:
            self._idle.pop(unit, None)
        self._add(units, owner)

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
        for unit, count in reversed(dropped.items()):  # of a sequence the end is fresh sooner than what it follows
            mine[unit] -= count
            if not mine[unit]:
                del mine[unit]
            self._references[unit] -= count
            if self._references[unit]:
                continue
            if unit in self._names:
                self._idle[unit] = None
            else:
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

    def held_alone_by(self, owner: Hashable) -> int:
        """Different units that would come free if `owner` gave everything back."""
        return sum(self._references[unit] == count for unit, count in self._owners.get(owner, Counter()).items())

    def _add(self, units: Iterable[int], owner: Hashable) -> None:
        mine = self._owners.setdefault(owner, Counter())
        for unit in units:
            mine[unit] += 1
            self._references[unit] += 1
        if not mine:
            del self._owners[owner]
