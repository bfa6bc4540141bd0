"""What is known of each block, and who is whose child: a block without those before it is of no use, so chains are
taken down from their ends."""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.kvstore.eviction import Use, rank, recompute_cost
from services.kvstore.tier import Held


@dataclass(frozen=True, slots=True)
class Chain:
    """A run of a chain: the k-th key is the parent of the next. parent: of the first one. first_block: how many come
    before that one."""

    namespace: str
    keys: Sequence[bytes]
    parent: bytes = b""
    first_block: int = 0

    def __iter__(self) -> Iterator[tuple[bytes, bytes, int]]:
        """(key, parent, number) of each."""
        before = (self.parent, *self.keys)
        return zip(self.keys, before, itertools.count(self.first_block), strict=False)


@dataclass(slots=True, eq=False)
class Entry:
    """A block that is in memory, beneath it, both, or on its way in. parent: b"" for a root, and where it is not known
    (the driver does not; the next chain that names it tells). number: blocks of its chain before it. seen_at: when it
    was last put, found or offered. arriving: a unit is being looked for. pinned_until: 0 where it is not pinned."""

    key: bytes
    namespace: str
    tenant: str
    num_bytes: int
    tokens: int
    use: Use
    seen_at: float
    parent: bytes = b""
    number: int = 0
    held: Held | None = None
    arriving: bool = False
    beneath: bool = False
    digest: bytes = b""
    leases: int = 0
    pinned_until: float = 0.0

    @property
    def in_memory(self) -> bool:
        return self.held is not None or self.arriving

    @property
    def is_whole(self) -> bool:
        return self.held is not None and self.held.is_whole

    @property
    def is_used(self) -> bool:
        """Whether it may not vanish now: leased, on its way in, or being read."""
        return self.leases > 0 or self.arriving or (self.held is not None and self.held.is_used)

    @property
    def rank(self) -> float:
        return rank(self.use, recompute_cost(self.number * self.tokens, self.tokens), self.num_bytes)


class Entries:
    """By key, the one that was seen longest ago first. bytes_of: what each tenant's blocks take, each counted once,
    wherever it lies."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._children: Counter[bytes] = Counter()
        self._children_held: Counter[bytes] = Counter()
        self.bytes_of: Counter[str] = Counter()
        self.num_beneath = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def add(self, entry: Entry) -> None:
        if entry.key in self._entries or entry.held is not None:
            raise ValueError("an entry comes in once, and empty")
        self._entries[entry.key] = entry
        self.bytes_of[entry.tenant] += entry.num_bytes
        self.num_beneath += entry.beneath
        self._count(self._children, entry.parent, 1)

    def remove(self, entry: Entry) -> None:
        self.hold(entry, None)
        self.set_beneath(entry, False)
        del self._entries[entry.key]
        self._count(self._children, entry.parent, -1)
        self.bytes_of[entry.tenant] -= entry.num_bytes
        if not self.bytes_of[entry.tenant]:
            del self.bytes_of[entry.tenant]

    def see(self, entry: Entry, now: float) -> None:
        entry.seen_at = now
        self._entries.move_to_end(entry.key)

    def relate(self, entry: Entry, parent: bytes, number: int) -> None:
        """What a chain says of it; an entry from the driver did not know."""
        if parent and not entry.parent:
            entry.parent = parent
            self._count(self._children, parent, 1)
            self._count(self._children_held, parent, int(entry.in_memory))
        entry.number = max(entry.number, number)

    def hold(self, entry: Entry, held: Held | None, *, arriving: bool = False) -> None:
        """The entry gets a unit, or gives it up."""
        before = entry.in_memory
        entry.held, entry.arriving = held, arriving
        self._count(self._children_held, entry.parent, int(entry.in_memory) - int(before))

    def set_beneath(self, entry: Entry, beneath: bool) -> None:
        self.num_beneath += int(beneath) - int(entry.beneath)
        entry.beneath = beneath

    def has_children(self, entry: Entry, *, in_memory: bool = False) -> bool:
        return entry.key in (self._children_held if in_memory else self._children)

    @staticmethod
    def _count(counter: Counter[bytes], parent: bytes, by: int) -> None:
        if parent and by:
            counter[parent] += by
            if not counter[parent]:
                del counter[parent]
