"""A kvstore with everything real around it: NATS, sidecars, and two or three workers as far as stores know them."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from services.kvstore.service import KvstoreService
from shared.bus.ask import ask
from shared.bus.nats import connect
from shared.protocol import subjects
from shared.protocol.reports import WorkerReport
from shared.protocol.store_messages import LoadReply, Offer, OfferReply
from shared.protocol.wire import WireModel
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters
from shared.runtime.deps import Deps
from shared.runtime.ids import new_boot_id, new_room, peer_name
from shared.runtime.settings import KvstoreSettings, load_settings
from shared.runtime.tasks import TaskOwner
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.store.client import StoreClient, StoreClientSettings
from shared.store.driver import BlockDriver
from shared.store.runs import BlockRun, Found
from shared.transfer.link import Piece, TicketKey
from shared.transfer.sidecar_options import SidecarOptions
from tests.contract.transfer_links import Side, new_ticket, sidecar_side

BLOCK = 64
LAYOUT = PoolLayout(
    (
        StateComponent("kv", IndexKind.PAGE, 16, (2, 3), (5,), "float32", (0, 1, 2)),
        StateComponent("pending", IndexKind.REQUEST, 1, (2,), (9,), "float32", (0, 1, 2)),
        StateComponent("index", IndexKind.PAGE, 16, (), (7,), "uint8", (0, 2)),
    ),
    num_pages=288,
    num_slots=2,
)
BLOCK_BYTES = BLOCK * (2 * 3 * 5 * 4 * 3 + 7 * 2)
MIB_BLOCKS = (1 << 20) // BLOCK_BYTES
"""So many are in a memory of one MiB."""
IDENTITY = "sha256:test"
DEADLINE_S = 30.0
R = TypeVar("R", bound=WireModel)


def in_pages_of(page_tokens: int, layout: PoolLayout = LAYOUT) -> PoolLayout:
    paged = (replace(c, unit_tokens=page_tokens) if c.index is IndexKind.PAGE else c for c in layout.components)
    return replace(layout, components=tuple(paged), num_pages=layout.num_pages * 16 // page_tokens)


def chain_of(name: str, count: int) -> tuple[bytes, ...]:
    """Keys as good as any."""
    return tuple(xxhash.xxh3_128_digest(f"{name} {k}".encode()) for k in range(count))


@dataclass
class Worker:
    """One end: a pool, its sidecar, and a client of the stores."""

    side: Side
    client: StoreClient
    deps: Deps

    @property
    def page_tokens(self) -> int:
        return self.side.layout.page_tokens

    def pages_for(self, num_blocks: int, start: int = 0) -> list[int]:
        """Pages that lie anything but in order."""
        each = BLOCK // self.page_tokens
        every = np.random.default_rng(start).permutation(self.side.layout.num_pages)
        return [int(page) for page in every[: num_blocks * each]]

    def rows(self, pages: Sequence[int]) -> list[bytes]:
        """What lies in these pages, by block: the rows of every PAGE component and layer, token by token."""
        each, found = BLOCK // self.page_tokens, []
        for k in range(len(pages) // each):
            content = b""
            for number, component in enumerate(self.side.layout.components):
                if component.index is IndexKind.PAGE:
                    units = self.side.component(number)[:, pages[k * each : (k + 1) * each]]
                    axis = 2 + len(component.outer)
                    rows = np.moveaxis(units, (1, axis), (0, 1))  # [pages, tokens, layers, *outer, *inner]
                    content += rows.reshape(BLOCK, -1).tobytes()
            found.append(content)
        return found

    async def put(self, chain: Sequence[bytes], pages: Sequence[int], start: int = 0, tenant: str = "t") -> int:
        """Blocks that were sent; nothing may go wrong."""
        (outcome,) = await self.client.put(BlockRun.of(chain, start), pages, tenant)
        assert outcome.error is None, outcome.error
        return outcome.sent

    async def find(self, chain: Sequence[bytes], start: int = 0) -> Found | None:
        return await self.client.lookup(BlockRun.of(chain, start))

    async def num_found(self, chain: Sequence[bytes]) -> int:
        found = await self.find(chain)
        if found is None:
            return 0
        await self.client.release(found)
        return found.num_blocks

    @asynccontextmanager
    async def opened(self, pages: Sequence[int]) -> AsyncIterator[tuple[TicketKey, bytes]]:
        """A ticket that these pages may be filled by."""
        key, secret = new_ticket()
        tables = tuple(tuple(pages) if c.index is IndexKind.PAGE else () for c in self.side.layout.components)
        await self.side.link.open(key, secret, tables, lambda _: None)
        try:
            yield key, secret
        finally:
            await self.side.link.fence(key)

    async def load(self, found: Found, pages: Sequence[int], within_s: float = 30.0) -> LoadReply:
        """Into pages for the whole chain; checked."""
        async with self.opened(pages) as (key, secret):
            deadline = self.deps.clock.now() + within_s
            reply = await self.client.load(found, key, secret, self.side.link.address, deadline)
            await self.client.check(key, reply)
            return reply


Ends = tuple[Worker, Worker, Worker]


@dataclass
class World:
    """stores: name -> running kvstore. All of them and the workers meet on one NATS."""

    nats_url: str
    directory: Path
    transfer: str
    tasks: TaskOwner
    stores: dict[str, KvstoreService] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def start_store(self, name: str, driver: BlockDriver | None = None, **settings: object) -> KvstoreService:
        given = {
            "name": name,
            "nats_url": self.nats_url,
            "ipc_dir": self.directory,
            "state_dir": self.directory / name,
            "transfer": self.transfer,
            "memory_mib": 1,
            "driver": None,
            "log_level": "warning",
        }
        store = KvstoreService(load_settings(KvstoreSettings, given | settings), driver=driver)
        self._running[name] = self.tasks.spawn(store.run(signals=False), name)
        await until(lambda: store.state == "ready")
        self.stores[name] = store
        return store

    async def end_store(self, name: str) -> None:
        self.stores.pop(name).request_stop()
        await asyncio.wait({self._running.pop(name)})

    async def add_worker(self, page_tokens: int, copies: int = 1, arguments: tuple[str, ...] = ()) -> Worker:
        name, layout = f"w{len(self.workers)}", in_pages_of(page_tokens)
        bus = await connect(self.nats_url, name)
        peer = peer_name(name, new_boot_id())
        deps = Deps(peer, bus, LoopClock(), self.tasks.spawn, self.tasks.spawn_vital, lambda: None, Counters())
        options = SidecarOptions(name, self.directory, transfer=self.transfer, arguments=arguments)
        side = await sidecar_side(options, layout)
        side.scramble()
        settings = StoreClientSettings(BLOCK, copies)
        stores = lambda: {name: store.peer for name, store in self.stores.items()}  # noqa: E731
        worker = Worker(side, StoreClient(deps, side.link, layout, IDENTITY, stores, settings), deps)
        self.workers.append(worker)
        return worker

    async def close(self) -> None:
        for name in list(self.stores):
            await self.end_store(name)
        for worker in self.workers:
            await worker.side.close()
            await worker.deps.bus.close()


@asynccontextmanager
async def world(nats_url: str, directory: Path, transfer: str) -> AsyncIterator[World]:
    async with TaskOwner() as tasks:
        made = World(nats_url, directory, transfer, tasks)
        try:
            yield made
        finally:
            await made.close()


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.005)


def at_rest(report: WorkerReport) -> bool:
    """Nothing is under way: every unit is free, or holds a whole block that nobody uses."""
    pages = report.pages
    idle = {"puts": 0, "loads": 0, "leases": 0, "writes": 0}
    return (
        all(idle[name] == count for name, count in report.queues.items())
        and (pages is None or (pages.quarantined == 0 and pages.in_tickets == pages.yieldable))
        and set(report.tickets) <= {"whole"}
    )


async def say(worker: Worker, store: KvstoreService, verb: str, message: WireModel, answer: type[R]) -> R:
    where = subjects.subject("kvstore", store.peer, verb)
    deadline = worker.deps.clock.now() + DEADLINE_S
    return await ask(worker.deps.bus, worker.deps.clock, where, message, answer, deadline=deadline)


def offer_of(worker: Worker, chain: tuple[bytes, ...], remaining_s: float = DEADLINE_S) -> Offer:
    return Offer(
        room=new_room(),
        generation=1,
        worker=worker.deps.peer,
        namespace=worker.client.namespace,
        keys=chain,
        remaining_s=remaining_s,
    )


def units_of(store: KvstoreService) -> tuple[int, int]:
    pages = store.report().pages
    assert pages is not None
    return pages.free, pages.quarantined


async def send_pieces(worker: Worker, reply: OfferReply, key: TicketKey, pages: list[int], components: int = 2) -> None:
    """What a worker sends for all blocks of an offer; fewer components: not all of it."""
    assert reply.link is not None
    pieces = tuple(Piece(k, 0, tuple(pages), worker.page_tokens) for k in (0, 2)[:components])
    await worker.side.link.send(key, reply.secret, reply.link, pieces)


def pid_of(worker: Worker) -> int:
    pid = worker.side.link.pid  # type: ignore[union-attr]
    assert pid is not None
    os.kill(pid, 0)
    return int(pid)
