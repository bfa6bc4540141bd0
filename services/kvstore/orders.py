"""Who goes next: out of a namespace's memory, out of the driver, and of a tenant's blocks."""

from collections.abc import Callable

from services.kvstore.entries import Entries, Entry
from services.kvstore.eviction import AFTER_CHILDREN, PINNED, Order


class Orders:
    """of_tenants: whether tenants have a quota."""

    def __init__(self, entries: Entries, *, of_tenants: bool) -> None:
        self._entries, self._of_tenants = entries, of_tenants
        self._in_memory: dict[str, Order] = {}
        self._beneath = self._of_vanishing(lambda entry: entry.beneath)
        self._tenant: dict[str, Order] = {}

    def open_namespace(self, name: str) -> None:
        self._in_memory[name] = Order(self._rank_in_memory)

    def close_namespace(self, name: str) -> None:
        del self._in_memory[name]

    def consider(self, entry: Entry) -> None:
        """It may be one that can go from now on."""
        if entry.held is not None:
            self._in_memory[entry.namespace].consider(entry.key)
        if entry.beneath:
            self._beneath.consider(entry.key)
        if self._of_tenants:
            self._order_of(entry.tenant).consider(entry.key)

    def consider_parent(self, entry: Entry) -> None:
        if (parent := self._entries.find(entry.parent)) is not None:
            self.consider(parent)

    def next_in_memory(self, namespace: str) -> Entry | None:
        """Who is to leave memory."""
        return self._known(self._in_memory[namespace].least())

    def next_beneath(self) -> Entry | None:
        """Who is to vanish for the driver's sake."""
        return self._known(self._beneath.least())

    def next_of(self, tenant: str) -> Entry | None:
        """Who is to vanish for the sake of the tenant's other blocks."""
        return self._known(self._order_of(tenant).least())

    def _known(self, key: bytes | None) -> Entry | None:
        return None if key is None else self._entries.find(key)

    def _order_of(self, tenant: str) -> Order:
        if tenant not in self._tenant:
            self._tenant[tenant] = self._of_vanishing(lambda entry: entry.tenant == tenant)
        return self._tenant[tenant]

    def _rank_in_memory(self, key: bytes) -> float | None:
        entry = self._entries.find(key)
        if entry is None or entry.held is None or entry.held.is_used:
            return None
        has_children = self._entries.has_children(entry, in_memory=True)
        if not entry.beneath and (entry.leases or has_children):
            return None
        return _rank(entry) + AFTER_CHILDREN * has_children

    def _of_vanishing(self, condition: Callable[[Entry], bool]) -> Order:
        def rank_of(key: bytes) -> float | None:
            entry = self._entries.find(key)
            if entry is None or entry.is_used or self._entries.has_children(entry) or not condition(entry):
                return None
            return _rank(entry)

        return Order(rank_of)


def _rank(entry: Entry) -> float:
    return entry.rank + PINNED * bool(entry.pinned_until)
