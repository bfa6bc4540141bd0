"""Which blocks there are, where each lies, and who may not lose it. Pure: it is told the time, and moves no bytes.

A block may lie in memory, beneath it (in the driver), or both. It *vanishes* when it lies nowhere any more.

- A leased block does not vanish. Nor does one that is being filled or read.
- Chains are taken down from their ends: a block vanishes only after its children, and leaves memory, if there is any
  choice, after those of them that are there. (Where a put of its parent was given up a block may be alone.)
- Of those that may go the one with the lowest rank goes (`eviction.py`); what is softly pinned goes last.
- A tenant over its quota makes room among its own blocks, never among others'.
- A block that nobody put, found or offered for `ttl_s` vanishes.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from services.kvstore.entries import Chain, Entries, Entry
from services.kvstore.eviction import Use
from services.kvstore.leases import Lease, Leases
from services.kvstore.orders import Orders
from services.kvstore.tier import Held, Tier
from shared.machines.block import FirstBytes, Verified
from shared.machines.stepping import Cause
from shared.runtime.counters import Counters
from shared.runtime.errors import StoreFull
from shared.store.driver import BlockRecord

_SWEPT_AT_ONCE = 256
EVICTED, GIVEN_UP = Cause("evicted"), Cause("given_up")


@dataclass(frozen=True, slots=True)
class Limits:
    """tenant_bytes: of each tenant's blocks, wherever they lie; 0: none. ttl_s: 0: none."""

    tenant_bytes: int = 0
    ttl_s: float = 0.0


class Index:
    """delete: told of each key that is to leave the driver. Namespaces are opened before anything is put into their
    memory; of blocks that are only beneath the namespace may be unopened."""

    def __init__(
        self, counters: Counters, limits: Limits = Limits(), delete: Callable[[bytes], None] = lambda key: None
    ) -> None:
        self.counters, self.limits, self.delete = counters, limits, delete
        self.entries = Entries()
        self.leases: Leases[Entry] = Leases()
        self.tiers: dict[str, Tier] = {}
        self.orders = Orders(self.entries, of_tenants=limits.tenant_bytes > 0)
        self._pins: list[tuple[float, bytes]] = []
        self._generations = itertools.count(1)

    def open_namespace(self, name: str, tier: Tier) -> None:
        self.tiers[name] = tier
        self.orders.open_namespace(name)

    def close_namespace(self, name: str) -> None:
        """Everything leaves its memory. StoreFull, and nothing is changed, where some of it is in use."""
        tier = self.tiers[name]
        found = [entry for entry in self.entries if entry.namespace == name and entry.held is not None]
        if any(held.is_used for held in tier) or any(lease.namespace == name for lease in self.leases):
            raise StoreFull("blocks of that namespace are in use")
        for entry in found:
            self._leave_memory(entry)
        del self.tiers[name]
        self.orders.close_namespace(name)

    # Puts

    def reserve(self, chain: Chain, tenant: str, now: float, pin_until: float = 0.0) -> dict[int, Entry] | None:
        """Takes units for those of its blocks that are not here nor on their way, as many leading ones as there is room
        for: by their places, RESERVED. None where the parent is not here, so that nothing is of use."""
        self.sweep(now)
        if chain.parent and self.entries.find(chain.parent) is None:
            return None
        wanted, seen = dict[int, Entry](), list[Entry]()
        for k, (key, parent, number) in enumerate(chain):
            entry = self.entries.find(key)
            if entry is not None:
                self.entries.relate(entry, parent, number)
                seen.append(entry)
                continue
            entry = self._reserve(chain.namespace, key, parent, number, tenant, now)
            if entry is None:
                break
            wanted[k] = entry
        for entry in reversed(seen):
            self.entries.see(entry, now)
        for entry in (*seen, *wanted.values()):
            self._pin(entry, pin_until)
        return wanted

    def first_bytes(self, held: Held, namespace: str) -> None:
        self.tiers[namespace].apply(held, FirstBytes(held.block.generation))

    def verified(self, entry: Entry, held: Held, digest: bytes) -> None:
        """All of it is there, and whoever wrote it is fenced off: readers see it."""
        self.tiers[entry.namespace].apply(held, Verified(held.block.generation))
        entry.digest = digest
        self.orders.consider(entry)

    def give_up(self, entry: Entry, held: Held) -> None:
        """It will not become whole, or is not any more. Its unit is not free before `quiesced`, or the last reader."""
        self.tiers[entry.namespace].end(held, GIVEN_UP)
        if entry.held is held:
            self.entries.hold(entry, None)
            self._settle(entry)

    def quiesced(self, held: Held, namespace: str) -> None:
        """Nobody writes the unit of a block that was given up."""
        self.tiers[namespace].quiesced(held)

    # Reads

    def held_of(self, chain: Chain, *, memory_only: bool = False) -> int:
        """How many leading blocks are there for readers."""
        return len(self._leading(chain, memory_only))

    def lookup(
        self, name: int, chain: Chain, now: float, until: float, pin_until: float = 0.0, *, memory_only: bool = False
    ) -> Lease[Entry] | None:
        """Leases the leading blocks that are there; None where there are none. Asked again it is the same lease.
        memory_only: what is beneath cannot be had now."""
        self.sweep(now)
        if (lease := self.leases.find(name, now)) is not None:
            return lease
        found = self._leading(chain, memory_only)
        if not found or self.leases.is_taken(name):
            return None
        self.leases.check_room()
        lease = Lease(name, chain.namespace, chain.first_block, tuple(found), until)
        self.leases.add(lease)
        relations = {key: (parent, number) for key, parent, number in chain}
        for entry in reversed(found):
            self.entries.relate(entry, *relations[entry.key])
            self.entries.see(entry, now)
            entry.use = entry.use.again(now)
            entry.leases += 1
            self._pin(entry, pin_until)
        return lease

    def bring(self, entry: Entry) -> Held | None:
        """A unit for a block that is only beneath, RESERVED; None where nothing can make room now."""
        return self._take(entry)

    def enter(self, entry: Entry) -> Held:
        """A reader of a whole block begins; it must `leave`."""
        assert entry.held is not None
        self.tiers[entry.namespace].enter(entry.held)
        return entry.held

    def leave(self, held: Held, namespace: str) -> None:
        self.tiers[namespace].leave(held)
        if (entry := self.entries.find(held.key)) is not None:
            self.orders.consider(entry)

    # What the driver has

    def recorded(self, record: BlockRecord, now: float) -> None:
        """It was there at the start."""
        if self.entries.find(record.key) is None:
            entry = Entry(
                record.key, record.namespace, record.tenant, record.num_bytes, record.tokens, Use(1.0, now), now
            )
            self.entries.add(entry)
            self.written(entry)
            entry.digest = record.digest

    def written(self, entry: Entry) -> None:
        self.entries.set_beneath(entry, True)
        self.orders.consider(entry)

    def lost_beneath(self, entry: Entry) -> None:
        """The driver has it no more, or damaged."""
        self.entries.set_beneath(entry, False)
        self._settle(entry)

    def make_room_beneath(self, num_bytes: int) -> list[bytes]:
        """Blocks vanish until so many bytes may leave the driver: their keys, which are to be deleted there; fewer, or
        none, where no more may go."""
        keys, freed = list[bytes](), 0
        while freed < num_bytes and (entry := self.orders.next_beneath()) is not None:
            freed += entry.num_bytes
            keys.append(entry.key)
            self._vanish(entry, tell_driver=False)
        return keys

    # Time

    def sweep(self, now: float) -> None:
        """What time alone changes: leases and pins end, and what nobody has used for long vanishes."""
        for lease in self.leases.take_over(now):
            self.counters.add("leases_ended")
            for entry in lease.entries:
                entry.leases -= 1
                self.orders.consider(entry)
        while self._pins and self._pins[0][0] <= now:
            _, key = heapq.heappop(self._pins)
            pinned = self.entries.find(key)
            if pinned is not None and pinned.pinned_until <= now:
                pinned.pinned_until = 0.0
                self.orders.consider(pinned)
        if self.limits.ttl_s:
            for entry in list(itertools.islice(self.entries, _SWEPT_AT_ONCE)):
                if entry.seen_at > now - self.limits.ttl_s:
                    break
                if not entry.is_used and not self.entries.has_children(entry):
                    self.counters.add("blocks_expired")
                    self._vanish(entry)

    def states(self) -> dict[str, int]:
        """How many blocks in memory are in which state."""
        return dict(+sum((tier.states for tier in self.tiers.values()), Counter[str]()))

    def _leading(self, chain: Chain, memory_only: bool) -> list[Entry]:
        found = list[Entry]()
        for key in chain.keys:
            entry = self.entries.find(key)
            if entry is None or entry.namespace != chain.namespace:
                break
            if not entry.is_whole and (memory_only or not entry.beneath):
                break
            found.append(entry)
        return found

    def _reserve(self, namespace: str, key: bytes, parent: bytes, number: int, tenant: str, now: float) -> Entry | None:
        tier = self.tiers[namespace]
        entry = Entry(key, namespace, tenant, tier.block_bytes, tier.block_tokens, Use(1.0, now), now, parent, number)
        self.entries.add(entry)
        self.entries.hold(entry, None, arriving=True)  # neither it nor its parent is to make room for it
        if self._within_quota(entry) and self._take(entry) is not None:
            return entry
        self.entries.remove(entry)
        self.orders.consider_parent(entry)
        return None

    def _take(self, entry: Entry) -> Held | None:
        tier, generation = self.tiers[entry.namespace], next(self._generations)
        self.entries.hold(entry, None, arriving=True)
        while (held := tier.take(entry.key, generation)) is None:
            if (victim := self.orders.next_in_memory(entry.namespace)) is None:
                break
            self._leave_memory(victim)
        self.entries.hold(entry, held)
        return held

    def _within_quota(self, entry: Entry) -> bool:
        limit, tenant = self.limits.tenant_bytes, entry.tenant
        if not limit:
            return True
        while self.entries.bytes_of[tenant] > limit:
            victim = self.orders.next_of(tenant)
            if victim is None:
                self.counters.add("quota_refused")
                return False
            self._vanish(victim)
        return True

    def _leave_memory(self, entry: Entry) -> None:
        assert entry.held is not None
        self.tiers[entry.namespace].end(entry.held, EVICTED)
        self.entries.hold(entry, None)
        self.counters.add("blocks_evicted")
        self._settle(entry)

    def _vanish(self, entry: Entry, *, tell_driver: bool = True) -> None:
        if entry.held is not None:
            self.tiers[entry.namespace].end(entry.held, EVICTED)
        if entry.beneath and tell_driver:
            self.delete(entry.key)
        self.counters.add("blocks_vanished")
        self.entries.remove(entry)
        self.orders.consider_parent(entry)

    def _settle(self, entry: Entry) -> None:
        """It has left memory or the driver: it vanishes where it lies nowhere now."""
        if entry.held is None and not entry.beneath:
            self.counters.add("blocks_vanished")
            self.entries.remove(entry)
        self.orders.consider_parent(entry)

    def _pin(self, entry: Entry, until: float) -> None:
        if until > entry.pinned_until:
            entry.pinned_until = until
            heapq.heappush(self._pins, (until, entry.key))
