"""Leases on what a lookup found: until one ends, its blocks stay. Pure: it is told the time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared.runtime.errors import QueueFull

E = TypeVar("E")


@dataclass(slots=True, eq=False)
class Lease(Generic[E]):
    """entries: the leading blocks of a chain, in order. loads: under way; while there are any the lease is not over,
    whatever the time."""

    name: int
    namespace: str
    first_block: int
    entries: tuple[E, ...]
    deadline: float
    loads: int = 0

    def is_over(self, now: float) -> bool:
        return now >= self.deadline and not self.loads


class Leases(Generic[E]):
    """By name. Bounded in number."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._leases: dict[int, Lease[E]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease[E]]:
        return iter(list(self._leases.values()))

    def find(self, name: int, now: float) -> Lease[E] | None:
        """A lease that holds. One whose time is over does not, though a load may still keep its blocks."""
        lease = self._leases.get(name)
        return lease if lease is not None and now < lease.deadline else None

    def check_room(self) -> None:
        if len(self._leases) >= self._capacity:
            raise QueueFull(f"{self._capacity} leases are held already")

    def add(self, lease: Lease[E]) -> None:
        if lease.name in self._leases:
            raise ValueError(f"lease {lease.name} is taken")
        self._leases[lease.name] = lease

    def is_taken(self, name: int) -> bool:
        return name in self._leases

    def take_over(self, now: float) -> list[Lease[E]]:
        """Those that are over now; they are leases no more."""
        over = [lease for lease in self._leases.values() if lease.is_over(now)]
        for lease in over:
            del self._leases[lease.name]
        return over
