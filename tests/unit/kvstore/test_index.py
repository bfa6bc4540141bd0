"""The index of the kvstore, rule by rule. `test_index_walk.py` mixes them."""

from collections.abc import Sequence

import pytest

from services.kvstore.entries import Chain, Entry
from services.kvstore.index import Index, Limits
from services.kvstore.tier import Held, Tier
from shared.runtime.counters import Counters
from shared.runtime.errors import QueueFull, StoreFull
from shared.store.driver import BlockRecord

BYTES, TOKENS = 100, 64
NO_LIMITS = Limits()


def keys_of(name: str, count: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{k}".encode().ljust(16, b".") for k in range(count))


class World:
    """An index with one namespace, and the shortest ways to use it."""

    def __init__(self, num_units: int, limits: Limits = NO_LIMITS) -> None:
        self.counters, self.deleted = Counters(), list[bytes]()
        self.index = Index(self.counters, limits, self.deleted.append)
        self.tier = Tier(num_units, BYTES, TOKENS, self.counters)
        self.index.open_namespace("n", self.tier)

    def reserve(
        self, keys: Sequence[bytes], now: float = 0.0, tenant: str = "t", parent: bytes = b"", pin_until: float = 0.0
    ) -> dict[int, Entry] | None:
        return self.index.reserve(Chain("n", keys, parent), tenant, now, pin_until)

    def put(
        self, keys: Sequence[bytes], now: float = 0.0, tenant: str = "t", parent: bytes = b"", pin_until: float = 0.0
    ) -> list[int]:
        wanted = self.reserve(keys, now, tenant, parent, pin_until)
        assert wanted is not None
        for entry in wanted.values():
            self.whole(entry)
        return list(wanted)

    def whole(self, entry: Entry) -> None:
        assert entry.held is not None
        self.index.first_bytes(entry.held, "n")
        self.index.verified(entry, entry.held, b"digest")

    def give_up(self, entry: Entry) -> Held:
        held = entry.held
        assert held is not None
        self.index.give_up(entry, held)
        return held

    def written(self, *keys: bytes) -> None:
        for key in keys:
            self.index.written(self.entry(key))

    def entry(self, key: bytes) -> Entry:
        entry = self.index.entries.find(key)
        assert entry is not None
        return entry

    def there(self, keys: Sequence[bytes], *, memory_only: bool = False) -> int:
        return self.index.held_of(Chain("n", keys), memory_only=memory_only)

    def lookup(self, name: int, keys: Sequence[bytes], now: float = 0.0, until: float = 10.0) -> int:
        lease = self.index.lookup(name, Chain("n", keys), now, until)
        return 0 if lease is None else len(lease.entries)


A, B, C = keys_of("a", 8), keys_of("b", 8), keys_of("c", 8)


def test_readers_see_a_block_once_it_is_verified_and_not_before() -> None:
    world = World(4)
    wanted = world.reserve(A[:2])
    assert wanted is not None
    assert list(wanted) == [0, 1]
    assert world.there(A) == 0
    for entry in wanted.values():
        assert entry.held is not None
        world.index.first_bytes(entry.held, "n")
    assert world.there(A) == world.lookup(1, A) == 0
    world.index.verified(wanted[0], wanted[0].held, b"d")  # type: ignore[arg-type]
    assert world.there(A) == 1
    world.index.verified(wanted[1], wanted[1].held, b"d")  # type: ignore[arg-type]
    assert world.there(A) == 2


def test_what_is_there_or_on_its_way_is_not_wanted_again() -> None:
    world = World(8)
    world.put(A[:2])
    assert list(world.reserve(A[:4]) or ()) == [2, 3]
    assert world.put(A[:5]) == [4]


def test_a_chain_without_its_parent_is_not_wanted() -> None:
    world = World(8)
    assert world.reserve(A[2:4], parent=A[1]) is None
    world.put(A[:2])
    assert list(world.reserve(A[2:4], parent=A[1]) or ()) == [0, 1]


def test_what_was_given_up_is_seen_by_nobody_and_its_unit_waits_for_the_proof() -> None:
    world = World(1)
    wanted = world.reserve(A[:1])
    assert wanted is not None
    held = world.give_up(wanted[0])
    assert world.there(A) == 0
    assert world.reserve(B[:1]) == {}, "somebody may still write the only unit"
    world.index.quiesced(held, "n")
    assert world.put(A[:1]) == [0], "the same block may come again"
    world.index.quiesced(held, "n")
    assert world.counters["events_late"] == 1
    assert world.there(A) == 1


def test_only_as_many_leading_blocks_are_wanted_as_there_is_room_for() -> None:
    world = World(3)
    assert list(world.reserve(A[:5]) or ()) == [0, 1, 2]
    assert world.reserve(B[:1]) == {}, "what is on its way makes no room"


def test_chains_are_taken_down_from_their_ends() -> None:
    world = World(4)
    world.put(A[:4])
    for k in range(3, -1, -1):
        world.put(B[3 - k : 4 - k], now=1.0 + k, parent=B[2 - k] if k < 3 else b"")
        assert world.there(A) == k
    assert world.there(B) == 4


def test_no_block_makes_room_for_its_own_child() -> None:
    world = World(2)
    world.put(A[:2])
    assert world.reserve(A[2:3], parent=A[1]) == {}
    assert world.there(A) == 2


def test_a_block_beneath_makes_room_for_its_child_where_nothing_else_does() -> None:
    world = World(2)
    world.put(A[:2])
    world.written(*A[:2])
    assert world.put(A[:3], now=1.0) == [2]
    assert world.there(A) == 3
    assert world.entry(A[0]).held is None
    world.put(B[:1], now=2.0)
    assert world.there(A) == 2, "the end went, though the other was older"


def test_a_lease_keeps_its_blocks_until_it_ends() -> None:
    world = World(2)
    world.put(A[:2])
    assert world.lookup(7, A, now=0.0, until=10.0) == 2
    assert world.lookup(7, A[:1], now=1.0, until=99.0) == 2, "asked again it is the same lease"
    assert world.reserve(B[:1], now=9.9) == {}
    assert world.put(B[:1], now=10.0) == [0]
    assert world.there(A) == 1
    assert len(world.index.leases) == 0
    assert world.counters["leases_ended"] == 1


def test_a_load_keeps_its_lease() -> None:
    world = World(1)
    world.put(A[:1])
    assert world.lookup(7, A, until=10.0) == 1
    lease = world.index.leases.find(7, 9.0)
    assert lease is not None
    lease.loads += 1
    assert world.reserve(B[:1], now=50.0) == {}
    assert world.index.leases.find(7, 50.0) is None, "no other load may begin"
    lease.loads -= 1
    assert world.put(B[:1], now=51.0) == [0]


def test_leases_are_bounded() -> None:
    world = World(1)
    world.put(A[:1])
    for name in range(1, 4097):
        assert world.lookup(name, A) == 1
    with pytest.raises(QueueFull):
        world.lookup(5000, A)
    assert world.lookup(5000, A, now=10.0, until=20.0) == 1, "they are over by then"


def test_a_block_that_is_read_keeps_its_unit_though_it_is_given_up() -> None:
    world = World(1)
    world.put(A[:1])
    held = world.index.enter(world.entry(A[0]))
    world.index.give_up(world.entry(A[0]), held)
    assert world.there(A) == 0
    assert world.reserve(B[:1]) == {}
    assert world.index.states() == {"evicting": 1}
    world.index.leave(held, "n")
    assert world.put(B[:1]) == [0]


def test_what_is_pinned_goes_last_and_only_while_it_is() -> None:
    world = World(2)
    world.put(A[:1], pin_until=50.0)
    world.put(B[:1], now=1.0)
    world.put(C[:1], now=2.0)
    assert (world.there(A), world.there(B), world.there(C)) == (1, 0, 1)
    world.put(C[1:2], now=3.0, parent=C[0])
    assert (world.there(A), world.there(C)) == (0, 2), "it was soft: nothing else could go"
    world = World(2)
    world.put(A[:1], pin_until=50.0)
    world.put(B[:1], now=1.0)
    world.put(C[:1], now=60.0)
    assert (world.there(A), world.there(B), world.there(C)) == (0, 1, 1)


def test_a_tenant_over_its_quota_makes_room_among_its_own() -> None:
    world = World(8, Limits(tenant_bytes=2 * BYTES))
    world.put(B[:2], now=0.0, tenant="other")
    world.put(A[:2], now=1.0)
    assert world.put(C[:1], now=2.0) == [0]
    assert (world.there(A), world.there(B), world.there(C)) == (1, 2, 1)
    assert world.lookup(1, A, now=3.0) == world.lookup(2, C, now=3.0) == 1
    assert world.reserve(C[1:2], parent=C[0], now=4.0) == {}, "all of its own is leased"
    assert world.counters["quota_refused"] == 1
    assert dict(world.index.entries.bytes_of) == {"other": 200, "t": 200}


def test_a_block_that_comes_again_does_not_make_room_for_itself() -> None:
    world = World(2, Limits(tenant_bytes=2 * BYTES))
    world.put(A[:1])
    world.put(B[:2], now=1.0, tenant="other")
    assert world.there(A) == 0
    world.put(C[:2], now=2.0)
    world.lookup(1, C, now=2.0)
    assert world.reserve(A[:1], now=3.0) == {}
    assert (len(list(world.tier)), world.there(C)) == (2, 2)


def test_what_nobody_uses_vanishes_in_time_its_ends_first() -> None:
    world = World(8, Limits(ttl_s=10.0))
    world.put(A[:2])
    world.put(B[:1])
    world.written(A[0])
    world.lookup(1, B, now=9.0, until=15.0)
    world.index.sweep(11.0)
    world.index.sweep(11.0)
    assert (world.there(A), world.there(B)) == (0, 1)
    assert world.deleted == [A[0]]
    world.index.sweep(18.9)
    assert world.there(B) == 1
    world.index.sweep(19.1)
    assert len(world.index.entries) == 0


def test_who_continues_a_chain_keeps_all_of_it_young() -> None:
    world = World(8, Limits(ttl_s=10.0))
    world.put(A[:2])
    world.put(A[:3], now=9.0)
    world.index.sweep(12.0)
    assert world.there(A) == 3


def test_a_block_beneath_leaves_memory_and_is_still_there() -> None:
    world = World(2)
    world.put(A[:2])
    world.written(*A[:2])
    assert world.lookup(1, A) == 2
    assert world.put(B[:2], now=1.0) == [0, 1], "leased, but not lost"
    assert world.there(A) == 2
    assert world.there(A, memory_only=True) == 0
    held = world.index.bring(world.entry(A[0]))
    assert held is not None
    assert world.there(A) == 2, "the driver has it, whatever becomes of this reading"
    world.index.first_bytes(held, "n")
    world.index.verified(world.entry(A[0]), held, b"digest")
    assert world.there(A, memory_only=True) == 1


def test_a_block_that_the_driver_has_lost_vanishes() -> None:
    world = World(2)
    world.put(A[:2])
    world.written(*A[:2])
    world.put(B[:2], now=1.0)
    held = world.index.bring(world.entry(A[0]))
    assert held is not None
    world.index.first_bytes(held, "n")
    world.index.lost_beneath(world.entry(A[0]))
    world.index.give_up(world.entry(A[0]), held)
    world.index.quiesced(held, "n")
    assert world.there(A) == 0
    assert world.tier.units.free == 1
    world.put(A[:2], now=2.0)
    assert world.there(A) == 2


def test_the_driver_s_room_is_made_by_the_least_that_it_has() -> None:
    world = World(8)
    world.put(A[:3])
    world.put(B[:2], now=100.0)
    world.written(*A[:3], *B[:2])
    assert world.index.make_room_beneath(BYTES + 1) == [A[2], A[1]]
    assert (world.there(A), world.there(B)) == (1, 2)
    assert world.deleted == [], "whoever asked deletes them"
    assert world.index.make_room_beneath(10 * BYTES) == [A[0], B[1], B[0]]
    assert len(world.index.entries) == 0
    assert world.tier.units.free == 8


def test_after_a_restart_the_next_chain_tells_who_is_whose_child() -> None:
    world = World(8)
    for key in A[:3]:
        world.index.recorded(BlockRecord(key, BYTES, b"d", "n", "t", TOKENS), 0.0)
        world.index.recorded(BlockRecord(key, BYTES, b"d", "n", "t", TOKENS), 0.0)
    assert world.index.entries.num_beneath == 3
    assert world.lookup(1, A, until=5.0) == 3
    assert [world.entry(key).parent for key in A[:3]] == [b"", A[0], A[1]]
    world.index.sweep(5.0)
    assert world.index.make_room_beneath(BYTES) == [A[2]]
    assert world.put(A[:4], now=6.0) == [2, 3]


def test_blocks_of_another_namespace_are_not_there() -> None:
    world = World(8)
    world.put(A[:2])
    assert world.index.held_of(Chain("other", A)) == 0


def test_a_namespace_in_use_is_not_closed() -> None:
    world = World(4)
    world.put(A[:2])
    world.written(A[0])
    world.lookup(1, A, until=5.0)
    with pytest.raises(StoreFull):
        world.index.close_namespace("n")
    assert world.there(A, memory_only=True) == 2
    world.index.sweep(5.0)
    world.index.close_namespace("n")
    assert world.tier.units.free == 4
    assert world.there(A) == 1


def test_states_are_counted() -> None:
    world = World(6)
    world.put(A[:3])
    world.reserve(B[:1])
    held = world.index.enter(world.entry(A[0]))
    assert world.index.states() == {"whole": 3, "reserved": 1}
    assert world.tier.num_idle == 2
    world.index.leave(held, "n")
    world.index.give_up(world.entry(A[2]), world.entry(A[2]).held)  # type: ignore[arg-type]
    world.index.quiesced(world.give_up(world.entry(B[0])), "n")
    assert world.index.states() == {"whole": 2}
    assert world.tier.num_idle == 2
