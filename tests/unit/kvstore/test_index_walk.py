"""The index under everything that puts, loads, leases, the driver and time may do to it, in any order: what is leased
stays, what is not whole is seen by nobody, units are conserved, and in the end all of them are free."""

import hypothesis.strategies as st
from hypothesis import assume
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.kvstore.entries import Chain, Entry
from services.kvstore.index import Index, Limits
from services.kvstore.tier import Held, Tier
from shared.machines.block import BlockState
from shared.runtime.counters import Counters

UNITS, BYTES, QUOTA = 6, 100, 5 * 100
TENANTS = ("t", "u")
Path = tuple[int, ...]
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def keys_of(path: Path, tenant: str) -> tuple[bytes, ...]:
    """A tree of chains: two that begin alike share those blocks. Tenants share none."""
    return tuple((tenant + "".join(map(str, path[: k + 1]))).encode().ljust(16, b".") for k in range(len(path)))


class Walk(RuleBasedStateMachine):
    puts = Bundle("puts")
    leases = Bundle("leases")
    readings = Bundle("readings")
    fetches = Bundle("fetches")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.counters, self.deleted = Counters(), list[bytes]()
        self.index = Index(self.counters, Limits(tenant_bytes=QUOTA, ttl_s=50.0), self.deleted.append)
        self.tier = Tier(UNITS, BYTES, 64, self.counters)
        self.index.open_namespace("n", self.tier)
        self.names = iter(range(1, 1 << 30))
        self.leased: dict[int, tuple[list[bytes], float]] = {}
        """The model: what each lease promised, and until when."""
        self.under_way: dict[bytes, int] = {}
        """Keys of puts that are not decided."""
        self.committed: set[bytes] = set()
        self.read: dict[int, Held] = {}

    @rule(target=puts, path=PATHS, tenant=st.sampled_from(TENANTS), pin_s=st.sampled_from((0.0, 5.0)))
    def offer(self, path: Path, tenant: str, pin_s: float) -> list[tuple[Entry, Held]]:
        pin_until = self.now + pin_s if pin_s else 0.0
        wanted = self.index.reserve(Chain("n", keys_of(path, tenant)), tenant, self.now, pin_until)
        assert wanted is not None
        places = list(wanted)
        assert places == sorted(places)
        blocks = []
        for entry in wanted.values():
            assert entry.held is not None
            blocks.append((entry, entry.held))
            self.under_way[entry.key] = self.under_way.get(entry.key, 0) + 1
        return blocks

    @rule(blocks=puts)
    def first_bytes(self, blocks: list[tuple[Entry, Held]]) -> None:
        for _, held in blocks:
            if held.block.state in (BlockState.RESERVED, BlockState.FILLING):
                self.index.first_bytes(held, "n")

    @rule(blocks=consumes(puts), commits=st.booleans())
    def decide(self, blocks: list[tuple[Entry, Held]], commits: bool) -> None:
        for entry, held in blocks:
            self.under_way.pop(entry.key)
            if commits:
                self.index.first_bytes(held, "n")
                self.index.verified(entry, held, b"d")
                self.committed.add(entry.key)
            else:
                self.index.give_up(entry, held)
                assert held.block.state is BlockState.QUARANTINED
                self.index.quiesced(held, "n")

    @rule(target=leases, path=PATHS, tenant=st.sampled_from(TENANTS), keep_s=st.sampled_from((1.0, 10.0)))
    def lookup(self, path: Path, tenant: str, keep_s: float) -> int:
        name, keys = next(self.names), keys_of(path, tenant)
        lease = self.index.lookup(name, Chain("n", keys), self.now, self.now + keep_s)
        if lease is not None:
            found = [entry.key for entry in lease.entries]
            assert found == list(keys[: len(found)])
            assert set(found) <= self.committed
            self.leased[name] = found, self.now + keep_s
        return name

    @rule(name=leases, keep_s=st.sampled_from((0.0, 7.0)))
    def keep(self, name: int, keep_s: float) -> None:
        lease = self.index.leases.find(name, self.now)
        assert (lease is not None) == (name in self.leased and self.leased[name][1] > self.now)
        if lease is not None:
            lease.deadline = self.now + keep_s
            self.leased[name] = self.leased[name][0], self.now + keep_s

    @rule(target=readings, path=PATHS, tenant=st.sampled_from(TENANTS))
    def enter(self, path: Path, tenant: str) -> int:
        entry = self.index.entries.find(keys_of(path, tenant)[-1])
        number = next(self.names)
        if entry is not None and entry.is_whole:
            self.read[number] = self.index.enter(entry)
        return number

    @rule(number=consumes(readings))
    def leave(self, number: int) -> None:
        if (held := self.read.pop(number, None)) is not None:
            self.index.leave(held, "n")

    @rule(path=PATHS, tenant=st.sampled_from(TENANTS))
    def written(self, path: Path, tenant: str) -> None:
        entry = self.index.entries.find(keys_of(path, tenant)[-1])
        assume(entry is not None and entry.is_whole)
        assert entry is not None
        self.index.written(entry)

    @rule(target=fetches, path=PATHS, tenant=st.sampled_from(TENANTS))
    def bring(self, path: Path, tenant: str) -> tuple[Entry, Held] | None:
        entry = self.index.entries.find(keys_of(path, tenant)[-1])
        if entry is None or not entry.beneath or entry.held is not None:
            return None
        held = self.index.bring(entry)
        return None if held is None else (entry, held)

    @rule(fetch=consumes(fetches), arrives=st.booleans())
    def fetched(self, fetch: tuple[Entry, Held] | None, arrives: bool) -> None:
        if fetch is None:
            return
        entry, held = fetch
        self.index.first_bytes(held, "n")
        if arrives:
            self.index.verified(entry, held, b"d")
        else:  # the driver is away
            self.index.give_up(entry, held)
            self.index.quiesced(held, "n")

    @rule(num_bytes=st.integers(1, 3 * BYTES))
    def the_driver_is_full(self, num_bytes: int) -> None:
        keys = self.index.make_room_beneath(num_bytes)
        assert not set(keys) & self.promised()

    @rule(path=PATHS, tenant=st.sampled_from(TENANTS))
    def damaged_in_memory(self, path: Path, tenant: str) -> None:
        entry = self.index.entries.find(keys_of(path, tenant)[-1])
        assume(entry is not None and entry.is_whole and (entry.beneath or not entry.leases))
        assert entry is not None
        assert entry.held is not None
        self.index.give_up(entry, entry.held)

    @rule(by=st.sampled_from((0.5, 3.0, 60.0)))
    def time_passes(self, by: float) -> None:
        self.now += by
        self.index.sweep(self.now)

    def promised(self) -> set[bytes]:
        return {key for keys, until in self.leased.values() if until > self.now for key in keys}

    @invariant()
    def what_is_leased_is_there(self) -> None:
        for key in self.promised():
            entry = self.index.entries.find(key)
            assert entry is not None
            assert entry.is_whole or entry.beneath

    @invariant()
    def what_is_not_decided_is_seen_by_nobody(self) -> None:
        for key in self.under_way:
            assert self.index.held_of(Chain("n", (key,))) == 0
        for entry in self.index.entries:
            if entry.is_whole or entry.beneath:
                assert entry.key in self.committed

    @invariant()
    def units_are_conserved(self) -> None:
        held = list(self.tier)
        assert self.tier.units.free + len(held) == UNITS
        assert len({one.unit for one in held}) == len(held)
        assert all(self.tier.units.is_held(one.unit) for one in held)
        known = [entry.held for entry in self.index.entries]
        assert all(one in known for one in held if one.block.state in (BlockState.RESERVED, BlockState.WHOLE))
        for reading in self.read.values():
            assert reading in held
        for entry in self.index.entries:
            assert entry.held is None or entry.held in held
            assert entry.held is not None or entry.beneath

    @invariant()
    def nobody_is_over_its_quota(self) -> None:
        assert all(used <= QUOTA for used in self.index.entries.bytes_of.values())

    def teardown(self) -> None:
        """Whatever happened: once all is over nothing is held."""
        for held in self.read.values():
            self.index.leave(held, "n")
        for held in list(self.tier):
            entry = self.index.entries.find(held.key)
            if held.block.state in (BlockState.RESERVED, BlockState.FILLING):
                assert entry is not None
                self.index.give_up(entry, held)
                self.index.quiesced(held, "n")
        self.index.sweep(self.now + 1e6)
        assert len(self.index.leases) == 0
        self.index.close_namespace("n")
        assert self.tier.units.free == UNITS
        assert all(entry.beneath and not entry.leases for entry in self.index.entries)
        self.index.make_room_beneath(1 << 40)
        assert len(self.index.entries) == 0
        assert not self.index.entries.bytes_of
        assert self.index.entries.num_beneath == 0


TestWalk = Walk.TestCase
