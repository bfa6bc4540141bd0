"""State moved between groups of ranks that share it unequally: each rank has a pool and a link of its own, each pair of
ranks moves what goes its way, and every pool ends up byte for byte as if it had been cut for its rank at the start."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from shared.protocol.reports import LinkAddress
from shared.runtime.errors import TransferError, TransferRefused
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import Shard
from shared.state.remap import ShardedState, routes
from shared.transfer.backend import Backend, Channel, Digests, Faults, Manifest, Timing
from shared.transfer.door import Door
from shared.transfer.ledger import Ledger
from shared.transfer.link import Piece, Receipt
from shared.transfer.pool import Pool, create_pool
from shared.transfer.sending import travelling
from shared.transfer.shm import ShmBackend
from shared.transfer.sidecar_options import SidecarOptions
from shared.transfer.tcp import TcpBackend
from tests.contract.transfer_links import Side, new_ticket, sidecar_side
from tests.support_remap import Rank, Whole, poisoned, put, random_whole

NUM_TOKENS = 21
SLOT = 1
SIZES = (12, 3)
WINDOW = 8
NONE = Faults()


def state(heads: int, tp_size: int, page_tokens: int, layers: tuple[int, ...] = (0, 1, 2)) -> ShardedState:
    """Attention with heads, a latent that every rank holds, a window with heads, and something every rank has once."""
    return ShardedState(
        (
            StateComponent("latent", IndexKind.PAGE, page_tokens, (), (5,), "uint8", (0, 2)),
            StateComponent("kv", IndexKind.PAGE, page_tokens, (2, heads), (3,), "float16", layers, 1),
            StateComponent("window", IndexKind.RING, WINDOW, (heads,), (4,), "uint8", (1,), 0),
            StateComponent("pending", IndexKind.REQUEST, 1, (2,), (3,), "float32", (0, 1)),
        ),
        tp_size,
    )


LAST = {"window": WINDOW, "pending": 1}


class Peer:
    """A rank: its pool in a memfd, its door and its backend, without a sidecar around them."""

    def __init__(self, kind: str, one: Rank, name: str, directory: Path, faults: Faults = NONE) -> None:
        self.one, shard = one, Shard(one.state.components, one.state.tp_size, one.rank)
        self.layout = replace(one.place.layout, shard=shard)
        self.fd = create_pool(self.layout)
        self.pool = Pool.map(self.fd, self.layout, writable=True)
        self.bytes = np.frombuffer(self.pool.bytes, dtype=np.uint8)[: self.layout.total_bytes]
        self.bytes[:] = one.pool
        self.door = Door(self.layout, lambda key, backend: None)
        self.backend: Backend
        if kind == "shm":
            port, args = 0, (name, directory, f"{name}.sock", Timing(), faults)
            self.backend = ShmBackend(self.pool, self.fd, self.door, *args)
        else:
            self.backend = TcpBackend(self.pool, self.door, name, "127.0.0.1", 0, Timing(), faults)
            port = self.backend.port
        self.address = LinkAddress(boot_id=name, host="127.0.0.1", port=port, socket=f"{name}.sock", backends=(kind,))


@dataclass
class Groups:
    sources: list[Peer]
    targets: list[Peer]
    whole: Whole

    def expected(self, target: Peer) -> bytes:
        wanted = replace(target.one, pool=target.one.pool.copy())
        put(wanted, self.whole, range(NUM_TOKENS), LAST)
        return wanted.pool.tobytes()


@contextmanager
def groups(
    kind: str, directory: Path, source: ShardedState, target: ShardedState, faults: Faults = NONE
) -> Iterator[Groups]:
    whole, sides = random_whole(source.components, NUM_TOKENS, 5), []
    with ExitStack() as stack:
        for side, group in enumerate((source, target)):
            count = -(-NUM_TOKENS // group.components[0].unit_tokens)
            pages = np.random.default_rng(side).permutation(SIZES[0])[:count].tolist()
            ranks = [poisoned(group, rank, pages, SLOT, SIZES, side) for rank in range(group.tp_size)]
            if side == 0:
                for one in ranks:
                    put(one, whole, range(NUM_TOKENS), LAST)
            sides.append([Peer(kind, one, f"{'st'[side]}{one.rank}", directory, faults) for one in ranks])
            for peer in sides[-1]:
                stack.callback(peer.backend.close)
        yield Groups(*sides, whole)


def pieces_of(peer: Peer, layers: range | None = None) -> tuple[Piece, ...]:
    """All of the request, in the peer's own units, in two pieces where there are pages enough."""
    found = []
    for index, component in enumerate(peer.layout.components):
        units = tuple(peer.one.place.pages) if component.index is IndexKind.PAGE else (SLOT,)
        rows = component.rows_in_last_unit(NUM_TOKENS)
        cut = len(units) // 2
        if cut:
            found.append(Piece(index, 0, units[:cut], component.unit_tokens))
        found.append(Piece(index, cut, units[cut:], rows))
    if layers is None:
        return tuple(found)
    of = [peer.layout.components[piece.component].num_layers for piece in found]
    chosen = [range(max(0, layers.start), min(n, layers.stop)) for n in of]
    return tuple(
        replace(piece, first_layer=some.start, num_layers=len(some))
        for piece, some in zip(found, chosen, strict=True)
        if some
    )


def is_set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def receipt_of(peer: Peer, channel: Channel, sends: list[tuple[tuple[Piece, ...], Digests]]) -> Receipt:
    """What a sender's books say of one peer."""
    ledger = Ledger(peer.layout.components if channel.fit is None else channel.fit.components)
    for pieces, digests in sends:
        for piece, layers in zip(travelling(channel.fit, pieces), digests, strict=True):
            ledger.record(piece.component, piece.first_unit, piece.rows_in_last, layers, piece.first_layer)
    return ledger.receipt()


CASES = [
    *((heads, a, b, 4, 4) for heads in (2, 3, 6) for a in (1, 2, 3) for b in (1, 2, 3)),
    (8, 8, 3, 4, 4),
    (1, 1, 4, 4, 4),
    (2, 4, 1, 4, 8),
    (6, 2, 3, 8, 4),
    (6, 3, 2, 4, 6),
    (4, 4, 4, 4, 8),
]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize(("heads", "source_tp", "target_tp", "source_page", "target_page"), CASES)
def test_every_rank_ends_up_with_what_it_would_have_computed(
    kind: str, heads: int, source_tp: int, target_tp: int, source_page: int, target_page: int, tmp_path: Path
) -> None:
    source, target = state(heads, source_tp, source_page), state(heads, target_tp, target_page)
    with groups(kind, tmp_path, source, target) as ends:
        key, secret = new_ticket()
        for peer in ends.targets:
            tables = [peer.one.place.pages if c.index is IndexKind.PAGE else (SLOT,) for c in peer.layout.components]
            peer.door.open(key, secret, tuple(tuple(table) for table in tables))
        untouched = [peer.bytes.tobytes() for peer in ends.sources]
        moved: dict[tuple[int, str], int] = {}
        for way in routes(source, target):
            ours, theirs = ends.sources[way.source_rank], ends.targets[way.target_rank]
            channel = ours.backend.connect(theirs.address)
            sends = [pieces_of(ours, layers) for layers in (range(1), range(1, 9))]
            done = [(pieces, channel.transfer(Manifest(key, secret, pieces), is_set())) for pieces in sends]
            receipt = theirs.door.received(key, way.source_rank)
            assert receipt == receipt_of(ours, channel, done)
            for one in receipt:
                moved[way.target_rank, one.name] = moved.get((way.target_rank, one.name), 0) + one.num_bytes
            channel.close()
        for peer in ends.targets:
            assert peer.bytes.tobytes() == ends.expected(peer)
            for component in peer.layout.components:
                rows = NUM_TOKENS if component.index is IndexKind.PAGE else LAST[component.name]
                wanted = rows * component.row_bytes * component.num_layers
                assert moved[peer.one.rank, component.name] == wanted, "each row comes to each rank once"
        assert [peer.bytes.tobytes() for peer in ends.sources] == untouched


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_ranks_between_which_nothing_goes_refuse_each_other(kind: str, tmp_path: Path) -> None:
    with groups(kind, tmp_path, state(4, 2, 4), state(4, 2, 4)) as ends:
        with pytest.raises(TransferRefused, match="nothing goes from rank 0 of 2 to rank 1 of 2"):
            ends.sources[0].backend.connect(ends.targets[1].address)
        ends.sources[1].backend.connect(ends.targets[1].address).close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_pool_that_is_not_what_its_rank_has_is_refused(kind: str, tmp_path: Path) -> None:
    with groups(kind, tmp_path, state(4, 2, 4), state(4, 1, 4)) as ends:
        for shard in (Shard(state(4, 1, 4).components, 2, 2), Shard(state(8, 1, 4).components, 2, 1)):
            ours = ends.sources[0]
            ours.pool.layout = replace(ours.layout, shard=shard)
            with pytest.raises(TransferRefused, match=r"geometry: (the pool is not what rank|there is no rank)"):
                ours.backend.connect(ends.targets[0].address)
        ours.pool.layout = replace(ours.layout, shard=Shard(state(4, 1, 4).components, 1 << 40, 0))
        with pytest.raises(TransferRefused, match="at most 64 may share"):
            ours.backend.connect(ends.targets[0].address)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_heads_that_were_spoiled_show_in_the_receipt(kind: str, tmp_path: Path) -> None:
    with groups(kind, tmp_path, state(2, 1, 4), state(2, 2, 8), Faults(corrupt=True)) as ends:
        key, secret = new_ticket()
        ours, theirs = ends.sources[0], ends.targets[1]
        theirs.door.open(key, secret, tuple((SLOT,) if k > 1 else tuple(theirs.one.place.pages) for k in range(4)))
        channel = ours.backend.connect(theirs.address)
        pieces = pieces_of(ours)
        digests = channel.transfer(Manifest(key, secret, pieces), is_set())
        got, sent = theirs.door.received(key, 0), receipt_of(ours, channel, [(pieces, digests)])
        assert [a.num_bytes for a in got] == [a.num_bytes for a in sent]
        assert all(a.digest != b.digest for a, b in zip(got, sent, strict=True) if a.num_bytes)
        channel.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_fence_ends_a_transfer_that_is_regrouped(kind: str, tmp_path: Path) -> None:
    """Nothing is written once the fence has been answered."""
    with groups(kind, tmp_path, state(2, 1, 4), state(2, 2, 8), Faults(delay_s=0.2)) as ends:
        key, secret = new_ticket()
        ours, theirs = ends.sources[0], ends.targets[0]
        begun, quiet = threading.Event(), threading.Event()
        theirs.door._on_first_bytes = lambda key, backend: begun.set()
        theirs.door.open(key, secret, tuple((SLOT,) if k > 1 else tuple(theirs.one.place.pages) for k in range(4)))
        channel = ours.backend.connect(theirs.address)
        found: list[Exception] = []

        def send() -> None:
            try:
                channel.transfer(Manifest(key, secret, pieces_of(ours)), is_set())
            except TransferError as error:
                found.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        assert begun.wait(30)
        theirs.door.fence(key, quiet.set)
        assert quiet.wait(30)
        before = theirs.bytes.tobytes()
        thread.join(30)
        assert found
        assert theirs.bytes.tobytes() == before == theirs.one.pool.tobytes()
        channel.close()


async def test_sidecars_keep_books_for_each_rank(tmp_path: Path) -> None:
    """Two ranks fill a third worker, which has everything."""
    source, target = state(2, 2, 4), state(2, 1, 8)
    whole = random_whole(source.components, NUM_TOKENS, 5)
    ranks = [poisoned(source, rank, range(6), SLOT, SIZES) for rank in range(2)]
    one = poisoned(target, 0, (7, 2, 4), SLOT, SIZES, 1)
    sides: list[Side] = []
    try:
        for number, (rank, group) in enumerate([(ranks[0], source), (ranks[1], source), (one, target)]):
            layout = replace(rank.place.layout, shard=Shard(group.components, group.tp_size, rank.rank))
            options = SidecarOptions(f"s{number}", tmp_path, transfer="tcp" if number == 1 else "auto")
            sides.append(await sidecar_side(options, layout))
            if number < 2:
                put(rank, whole, range(NUM_TOKENS), LAST)
            sides[-1].pool[:] = rank.pool
        receiver = sides[2].link
        key, secret = new_ticket()
        await receiver.open(key, secret, ((7, 2, 4), (7, 2, 4), (SLOT,), (SLOT,)), lambda _key: None)
        for number, rank in enumerate(ranks):
            units = tuple(range(6))
            pieces = (
                Piece(0, 0, units, 1),
                Piece(1, 0, units, 1),
                Piece(2, 0, (SLOT,), WINDOW),
                Piece(3, 0, (SLOT,), 1),
            )
            await sides[number].link.send(key, secret, receiver.address, pieces)
            assert await sides[number].link.sent(key, 0) == await receiver.received(key, number)
            assert (await sides[number].link.sent(key, 1))[0].num_bytes == 0
            assert rank.rank == number
        got = [await receiver.received(key, number) for number in range(2)]
        assert [a.num_bytes + b.num_bytes for a, b in zip(*got, strict=True)] == [
            NUM_TOKENS * 5 * 2,
            NUM_TOKENS * 2 * 2 * 3 * 2 * 3,
            WINDOW * 2 * 4,
            2 * 3 * 4 * 2,
        ]
        wanted = replace(one, pool=one.pool.copy())
        put(wanted, whole, range(NUM_TOKENS), LAST)
        assert sides[2].pool.tobytes() == wanted.pool.tobytes()
        assert [side.link.actual_backend(key) for side in sides[:2]] == ["shm", "tcp"]
        await receiver.fence(key)
    finally:
        for side in sides:
            await side.close()
