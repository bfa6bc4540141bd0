"""What workers make of a kvstore: blocks go there as they complete and come back into another worker's pages, and where
it fails nothing is lost but the blocks. Everything is real but the engines, of which only the pages matter."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from services.decode.history import stored_history
from services.decode.loading import Loaded, load_stored
from services.decode.ticket import DecodeTicket
from services.kvstore.service import KvstoreService
from shared.engine.api import Engine
from shared.engine.lending import Loan
from shared.protocol.messages import Reserve, SamplingSpec
from shared.runtime.errors import Corrupt, PeerLost, StoreError
from shared.runtime.ids import new_room
from shared.state.layout import PoolLayout
from shared.store.client import StoreClient, StoreClientSettings
from shared.store.keys import chain
from shared.store.runs import BlockRun, PutOutcome
from shared.transfer.link import TicketKey
from shared.worker.checkpoint import Checkpoint
from shared.worker.stores import Stores
from tests.contract.kvstore.world import BLOCK, IDENTITY, Ends, Worker, World, at_rest, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
SALT = "tenant-a"


def tokens_of(name: str, count: int) -> tuple[int, ...]:
    return tuple((hash_ + 31 * k) % 50_000 for k, hash_ in enumerate([sum(name.encode())] * count))


@dataclass
class Lender:
    """An engine as far as stores know it. own: pages of the one group there is. computed: positions with state."""

    layout: PoolLayout
    own: list[int]
    computed: int = 0
    identity: str = IDENTITY
    open_loans: list[Loan] = field(default_factory=list)

    def lend(self, _key: TicketKey, start: int, end: int) -> Loan | None:
        if end > self.computed:
            return None
        each = self.layout.page_tokens
        loan = Loan(tuple(self.own[start // each : end // each]), lambda: self.open_loans.remove(loan))
        self.open_loans.append(loan)
        return loan

    def pages(self) -> tuple[int, int, int]:
        return self.layout.num_pages, 0, 0

    def unit_tables(self, _key: TicketKey) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.own) if c.index.value == "page" else () for c in self.layout.components)


class Bench:
    """A worker's end with an engine of `num_blocks` blocks."""

    def __init__(self, worker: Worker, num_blocks: int) -> None:
        self.worker = worker
        self.lender = Lender(worker.side.layout, worker.pages_for(num_blocks))
        self.stores = Stores(worker.deps, cast(Engine, self.lender), worker.client)
        self.told: list[int] = []

    def checkpoint(self, tokens: tuple[int, ...], salt: str = SALT, came_by: str = "raw") -> Checkpoint:
        lineage = self.stores.lineage(salt, came_by)
        return Checkpoint(
            self.worker.deps, self.stores, TicketKey(new_room(), 1), lineage, tokens, salt, self.told.append
        )

    def reach(self, checkpoint: Checkpoint, position: int) -> None:
        self.lender.computed = position
        checkpoint.reach(position)

    async def quiet(self) -> None:
        await until(lambda: not self.lender.open_loans and not self.stores.num_lent)

    def ticket(self, tokens: tuple[int, ...], salt: str = SALT, **more: Any) -> DecodeTicket:
        order = Reserve(
            room=new_room(),
            generation=1,
            request_id="r",
            gateway="g",
            prefill=None,
            identity=IDENTITY,
            prompt=tokens,
            sampling=SamplingSpec(),
            remaining_s=30.0,
            salt=salt,
            load=True,
            **more,
        )
        return DecodeTicket(order, self.worker.deps.clock, self.worker.deps.counters, b"s" * 32)

    async def load(self, tokens: tuple[int, ...], **more: Any) -> tuple[Loaded, DecodeTicket]:
        ticket = self.ticket(tokens, **more)
        return await load_stored(self.worker.deps, self.worker.side.link, self.stores, ticket), ticket

    def rows(self) -> list[bytes]:
        return self.worker.rows(self.lender.own)


async def stored(bench: Bench, tokens: tuple[int, ...], **how: Any) -> None:
    """All whole blocks of these are in the store."""
    bench.reach(bench.checkpoint(tokens, **how), len(tokens))
    await bench.quiet()
    assert bench.told[-1:] == [len(tokens) // BLOCK * BLOCK]


async def test_blocks_go_there_as_they_complete_and_another_worker_goes_on_from_them(
    ends: Ends, store: KvstoreService
) -> None:
    putter, *loaders = ends
    bench, tokens = Bench(putter, 5), tokens_of("grows", 5 * BLOCK + 1)
    checkpoint = bench.checkpoint(tokens[: 3 * BLOCK + 9])
    bench.reach(checkpoint, BLOCK - 1)
    assert not bench.lender.open_loans, "no block is complete"
    bench.reach(checkpoint, 2 * BLOCK)
    await bench.quiet()
    for token in tokens[3 * BLOCK + 9 :]:
        checkpoint.add(token)
    bench.reach(checkpoint, 5 * BLOCK)
    await bench.quiet()
    assert bench.told == [2 * BLOCK, 5 * BLOCK]
    for loader in loaders:
        other = Bench(loader, 5)
        loaded, ticket = await other.load(tokens, load_least=2 * BLOCK)
        assert (loaded.num_tokens, loaded.lossiest) == (5 * BLOCK, "raw")
        assert ticket.timings.loaded_tokens == 5 * BLOCK
        assert sum(size for _, size in ticket.timings.bytes) > 0
        assert other.rows() == bench.rows()
    await until(lambda: at_rest(store.report()))


async def test_what_cannot_be_lent_at_once_follows_without_another_token(ends: Ends) -> None:
    bench, tokens = Bench(ends[0], 5), tokens_of("in parts", 5 * BLOCK)
    each = BLOCK // bench.lender.layout.page_tokens
    bench.stores._most_lent = 2 * each
    bench.reach(bench.checkpoint(tokens), len(tokens))
    assert bench.stores.num_lent == 2 * each
    await until(lambda: bench.told[-1:] == [5 * BLOCK])
    assert bench.told == [2 * BLOCK, 4 * BLOCK, 5 * BLOCK]
    await bench.quiet()


async def test_the_last_position_is_computed_whatever_is_there(ends: Ends) -> None:
    putter, loader, _ = ends
    bench, tokens = Bench(putter, 2), tokens_of("to the brim", 2 * BLOCK)
    await stored(bench, tokens)
    loaded, _ = await Bench(loader, 2).load(tokens, load_least=2 * BLOCK)
    assert loaded.num_tokens == BLOCK


@pytest.mark.parametrize("what", ["salt", "identity", "tokens", "lossy"])
async def test_what_differs_never_hits(ends: Ends, what: str) -> None:
    putter, loader, _ = ends
    tokens = tokens_of(f"differs in {what}", 2 * BLOCK + 1)
    await stored(Bench(putter, 2), tokens, came_by="int8" if what == "lossy" else "raw")
    other = Bench(loader, 2)
    before, salt = other.rows(), SALT
    if what == "salt":
        salt = "tenant-b"
    elif what == "identity":
        other.lender.identity = "sha256:other"
    elif what == "tokens":
        tokens = (tokens[0] + 1, *tokens[1:])
    loaded, _ = await other.load(tokens, salt=salt)
    assert loaded == Loaded()
    assert other.rows() == before
    with pytest.raises(StoreError, match="0 positions of 64"):
        await other.load(tokens, salt=salt, load_least=BLOCK)


async def test_a_request_that_accepts_the_loss_gets_what_came_by_it(ends: Ends) -> None:
    putter, loader, _ = ends
    tokens = tokens_of("lossy", 2 * BLOCK + 1)
    await stored(Bench(putter, 2), tokens, came_by="int8")
    loaded, _ = await Bench(loader, 2).load(tokens, kv_precision="int8")
    assert (loaded.num_tokens, loaded.lossiest) == (2 * BLOCK, "int8")


async def test_what_one_has_put_the_other_need_not_send(ends: Ends, store: KvstoreService) -> None:
    putter, second, _ = ends
    tokens = tokens_of("twice", 3 * BLOCK)
    await stored(Bench(putter, 3), tokens)
    before = store.counters["blocks_stored"]
    await stored(Bench(second, 3), tokens)
    assert store.counters["blocks_stored"] == before


async def test_without_a_store_nothing_is_lent_and_everything_is_computed(ends: Ends) -> None:
    putter, _, _ = ends
    bench, tokens = Bench(putter, 2), tokens_of("no store", 2 * BLOCK + 1)
    gone: Callable[[], dict[str, str]] = dict
    bench.stores.client = with_stores(putter, gone)
    bench.reach(bench.checkpoint(tokens), 2 * BLOCK)
    assert not bench.lender.open_loans
    assert (await bench.load(tokens))[0] == Loaded()
    with pytest.raises(StoreError):
        await bench.load(tokens, load_least=1)


async def test_a_store_that_does_not_answer_is_left_alone_for_a_moment_and_then_gets_all(
    cluster: World, ends: Ends, store: KvstoreService
) -> None:
    putter, loader, _ = ends
    bench, tokens = Bench(putter, 3), tokens_of("was away", 3 * BLOCK + 1)
    where = {"name": "nobody-there"}
    bench.stores.client = with_stores(putter, lambda: where)
    checkpoint = bench.checkpoint(tokens)
    bench.reach(checkpoint, BLOCK)
    await bench.quiet()
    assert bench.told == []
    bench.reach(checkpoint, 2 * BLOCK)
    assert not bench.lender.open_loans, "it is asked again too soon"
    where["name"] = store.peer
    bench.stores._paused_until = 0.0
    bench.reach(checkpoint, 3 * BLOCK)
    await bench.quiet()
    assert bench.told == [3 * BLOCK]
    assert (await Bench(loader, 3).load(tokens))[0].num_tokens == 3 * BLOCK


async def test_what_a_full_store_does_not_take_is_offered_with_the_next_block_and_not_before(ends: Ends) -> None:
    putter, _, _ = ends
    bench, tokens = Bench(putter, 3), tokens_of("full", 3 * BLOCK)
    offered: list[int] = []

    async def put(run: BlockRun, pages: list[int], tenant: str) -> tuple[PutOutcome, ...]:
        offered.append(len(run.keys))
        return (PutOutcome("full", sent=0, held=1),)

    bench.stores.client.put = put  # type: ignore[method-assign,assignment]
    checkpoint = bench.checkpoint(tokens)
    for position in (2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 2, 3 * BLOCK):
        bench.reach(checkpoint, position)
        await bench.quiet()
    assert offered == [2, 3]
    assert bench.told == [BLOCK]
    del bench.stores.client.put


async def test_slow_stores_keep_a_quarter_of_the_pages_at_most(ends: Ends) -> None:
    putter, _, _ = ends
    quarter = putter.side.layout.num_pages // 4
    num_blocks = quarter * putter.page_tokens // BLOCK + 1
    bench = Bench(putter, num_blocks)
    checkpoint = bench.checkpoint(tokens_of("long", num_blocks * BLOCK))
    bench.reach(checkpoint, num_blocks * BLOCK)
    assert bench.stores.num_lent == quarter // (BLOCK // putter.page_tokens) * (BLOCK // putter.page_tokens)
    await bench.quiet()
    bench.reach(checkpoint, num_blocks * BLOCK)
    await bench.quiet()
    assert bench.told[-1] == num_blocks * BLOCK


async def test_a_damaged_block_ends_the_run_before_it(ends: Ends, store: KvstoreService) -> None:
    putter, loader, _ = ends
    bench, tokens = Bench(putter, 3), tokens_of("damaged", 3 * BLOCK + 1)
    await stored(bench, tokens)
    damage(store, chain(bench.stores.lineage(SALT, "raw"), tokens)[1])
    other = Bench(loader, 3)
    loaded, _ = await other.load(tokens)
    assert loaded.num_tokens == BLOCK
    assert other.rows()[0] == bench.rows()[0]
    with pytest.raises(StoreError):
        await Bench(loader, 3).load(tokens, load_least=2 * BLOCK)


def with_stores(worker: Worker, stores: Callable[[], dict[str, str]]) -> StoreClient:
    """The worker's client, which sees these."""
    settings = StoreClientSettings(BLOCK, answer_s=0.5, put_s=2.0)
    return StoreClient(worker.deps, worker.side.link, worker.side.layout, IDENTITY, stores, settings)


def damage(store: KvstoreService, key: bytes) -> None:
    """One byte of a block that is in memory."""
    assert store.namespaces is not None
    (namespace,) = store.namespaces
    entry = store.index.entries.find(key)
    assert entry is not None
    assert entry.held is not None
    namespace.parts(entry.held.unit)[2][5] ^= 1


def rows(bench: Bench, start: int, end: int) -> list[bytes]:
    """Of these blocks."""
    each = BLOCK // bench.lender.layout.page_tokens
    return bench.worker.rows(bench.lender.own[start * each : end * each])


async def test_the_beginning_comes_while_somebody_else_fills_the_rest(ends: Ends, store: KvstoreService) -> None:
    """Under a key of its own, into the units of the beginning alone."""
    putter, *loaders = ends
    bench, tokens = Bench(putter, 4), tokens_of("hybrid", 3 * BLOCK + 5)
    await stored(bench, tokens)
    for loader in loaders:
        other = Bench(loader, 4)
        before, ticket = rows(other, 3, 4), other.ticket(tokens)
        async with stored_history(loader.deps, loader.side.link, other.stores, ticket):
            assert ticket.given.num_tokens == 3 * BLOCK
        parts = [(rows(bench, 0, 3), rows(other, 0, 3)), (before, rows(other, 3, 4))]
        assert all(there == here for there, here in parts)
        assert ticket.timings.loaded_tokens == 3 * BLOCK
        assert ticket.timings.loaded_bytes > 0
        assert ticket.doors == []
    await until(lambda: at_rest(store.report()))


@pytest.mark.parametrize("what", ["fails", "brings less"])
async def test_a_beginning_that_does_not_come_ends_the_ticket_and_is_nobodys_fault(
    ends: Ends, store: KvstoreService, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    putter, loader, _ = ends
    tokens = tokens_of(f"hybrid {what}", 2 * BLOCK + 1)
    await stored(Bench(putter, 2), tokens)
    other = Bench(loader, 2)
    ticket, load = other.ticket(tokens), other.stores.client.load

    async def spoiled(*args: Any, **more: Any) -> Any:
        if what == "fails":
            raise PeerLost("gone")
        return await load(*args, **more, num_blocks=1)

    monkeypatch.setattr(other.stores.client, "load", spoiled)
    with pytest.raises(StoreError, match="did not come" if what == "fails" else "64 positions came of 128"):
        async with stored_history(loader.deps, loader.side.link, other.stores, ticket):
            await asyncio.sleep(30.0)
    assert ticket.doors == []
    await until(lambda: at_rest(store.report()))


async def test_who_leaves_while_the_beginning_comes_leaves_nothing(ends: Ends, store: KvstoreService) -> None:
    putter, loader, _ = ends
    tokens = tokens_of("hybrid left", 2 * BLOCK + 1)
    await stored(Bench(putter, 2), tokens)
    other = Bench(loader, 2)
    ticket = other.ticket(tokens)
    with pytest.raises(Corrupt):
        async with stored_history(loader.deps, loader.side.link, other.stores, ticket):
            raise Corrupt("the rest was spoiled")
    assert ticket.doors == []
    await until(lambda: at_rest(store.report()))


async def test_what_no_store_has_is_left_to_whoever_computes_it(ends: Ends) -> None:
    loader = ends[1]
    other, tokens = Bench(loader, 2), tokens_of("hybrid unknown", 2 * BLOCK + 1)
    ticket = other.ticket(tokens)
    async with stored_history(loader.deps, loader.side.link, other.stores, ticket):
        assert ticket.given == ticket.held
    async with stored_history(loader.deps, loader.side.link, None, ticket):
        assert ticket.given == ticket.held
