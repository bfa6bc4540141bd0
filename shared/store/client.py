"""How a worker uses the kvstores: it puts blocks out of its pages, and has blocks loaded into a ticket of its own.

A store that is full, slow or gone costs the blocks it would have kept or brought, and nothing else: `put` and `lookup`
do not raise for its sake.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shared.bus.ask import ask
from shared.protocol import subjects
from shared.protocol.messages import Cancel, CommitStatus, Verdict
from shared.protocol.reports import LinkAddress
from shared.protocol.store_messages import (
    Lease,
    Load,
    LoadReply,
    LoadStatus,
    Lookup,
    LookupReply,
    Offer,
    OfferReply,
    OfferStatus,
    Stored,
    StoredReply,
)
from shared.protocol.wire import WireModel
from shared.runtime.deps import Deps
from shared.runtime.errors import (
    BatonError,
    Corrupt,
    GeometryMismatch,
    StoreError,
    StoreUnavailable,
    error_from_code,
)
from shared.runtime.ids import new_room
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout
from shared.store.namespaces import spec_of
from shared.store.placement import asked, homes
from shared.store.runs import BlockRun, Found, PutOutcome
from shared.transfer.classes import Standing, TrafficClass
from shared.transfer.formats.catalog import EXACT
from shared.transfer.link import Link, Piece, TicketKey, digests_of

_BACKGROUND = Standing(TrafficClass.BACKGROUND)
_CANCEL_S = 2.0
R = TypeVar("R", bound=WireModel)


@dataclass(frozen=True, slots=True)
class StoreClientSettings:
    """copies: stores that keep each block. put_s: how long a put may take. answer_s: how long all stores together are
    waited for by a lookup. lease_s: how long what is found stays. put_blocks: most blocks of one ticket."""

    block_tokens: int = 64
    copies: int = 1
    put_s: float = 30.0
    answer_s: float = 2.0
    lease_s: float = 30.0
    put_blocks: int = 256


class StoreClient:
    """stores: name -> peer of those that are there (`roster.py`). layout: of this worker's own pool. Raises
    GeometryMismatch where its pages do not make up blocks."""

    def __init__(
        self,
        deps: Deps,
        link: Link,
        layout: PoolLayout,
        identity: str,
        stores: Callable[[], Mapping[str, str]],
        settings: StoreClientSettings = StoreClientSettings(),
    ) -> None:
        if settings.block_tokens % layout.page_tokens or layout.shard is not None:
            raise GeometryMismatch(
                f"blocks of {settings.block_tokens} tokens are not made up of pages of {layout.page_tokens}"
                if layout.shard is None
                else "a rank's share of a state cannot be stored yet"
            )
        self._deps, self._link, self._layout, self._stores, self._settings = deps, link, layout, stores, settings
        self._pages_each = settings.block_tokens // layout.page_tokens
        self.namespace = spec_of(identity, layout, settings.block_tokens)
        self.block_tokens = settings.block_tokens

    @property
    def are_there(self) -> bool:
        """Whether there is a store now."""
        return bool(self._stores())

    async def put(
        self, run: BlockRun, pages: Sequence[int], tenant: str = "", pin_s: float = 0.0
    ) -> tuple[PutOutcome, ...]:
        """Puts what its homes do not have yet, in the lowest class; one outcome for each of them. pages: of all blocks
        of the run, in order; they must hold still until this returns, however it does."""
        if len(pages) != len(run.keys) * self._pages_each:
            raise ValueError(f"{len(run.keys)} blocks do not lie in {len(pages)} pages")
        stores = self._stores()
        names = homes(run.root, stores, self._settings.copies) if run.keys else []
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._put_all(name, stores[name], run, pages, tenant, pin_s)) for name in names]
        return tuple(task.result() for task in tasks)

    async def lookup(self, run: BlockRun, pin_s: float = 0.0, answer_s: float | None = None) -> Found | None:
        """The leading blocks of the run at the store that has most of them; None where none has any. To be released.
        answer_s: as in the settings."""
        best: Found | None = None
        stores, deadline = self._stores(), self._deps.clock.now() + (answer_s or self._settings.answer_s)
        for name in asked(run.root, stores, self._settings.copies) if run.keys else ():
            found = await self._lookup_at(name, stores[name], run, pin_s, deadline)
            if found is not None and (best is None or found.num_blocks > best.num_blocks):
                best, found = found, best
            if found is not None:
                self._deps.spawn(self.release(found), "release-lease")
            if best is not None and best.num_blocks == len(run.keys):
                break
        return best

    async def load(
        self,
        found: Found,
        key: TicketKey,
        secret: bytes,
        link: LinkAddress,
        deadline: float,
        *,
        num_blocks: int | None = None,
        wire_format: str = EXACT,
        priority: int = 0,
    ) -> LoadReply:
        """Has leading blocks of a lease sent into a ticket that is open at `link`, at the positions that they have in
        their chain. Returns when all that could be had is there, which may be fewer (`num_blocks`); `check` compares
        it with what our sidecar has. Raises BatonError, for whatever reason; what came is then not to be used."""
        order = Load(
            room=key.room,
            generation=key.generation,
            lease=found.lease,
            num_blocks=found.num_blocks if num_blocks is None else num_blocks,
            first_token=found.run.first_block * self._settings.block_tokens,
            link=link,
            secret=secret,
            wire_format=wire_format,
            priority=priority,
            remaining_s=max(0.0, deadline - self._deps.clock.now()),
        )
        try:
            reply = await self._ask(found.peer, subjects.LOAD, order, LoadReply, deadline)
            while reply.status is LoadStatus.PENDING:
                reply = await self._ask(found.peer, subjects.LOAD, order, LoadReply, deadline)
        except BaseException:
            self._deps.spawn(self._cancel(found.peer, key), "cancel-load")
            raise
        if reply.status is LoadStatus.FAILED:
            raise error_from_code(reply.code, reply.message)
        if reply.num_blocks > order.num_blocks:
            raise Corrupt(f"{reply.num_blocks} blocks were sent of {order.num_blocks}")
        return reply

    async def check(self, key: TicketKey, reply: LoadReply) -> None:
        """Raises Corrupt, naming the component, unless what our own sidecar received for the ticket is what was sent,
        and that is all of so many blocks. For tickets that get bytes from this one load only."""
        sent = [(one.name, one.num_bytes) for one in reply.components]
        if sent != self._bytes_of(reply.num_blocks):
            raise Corrupt(f"{reply.num_blocks} blocks are {self._bytes_of(reply.num_blocks)}, and {sent} was sent")
        for ours, theirs in zip(digests_of(await self._link.received(key)), reply.components, strict=True):
            if ours != theirs:
                raise Corrupt(f"component {theirs.name!r}: what arrived ({ours.num_bytes} bytes) is not what was sent")

    async def release(self, found: Found) -> None:
        """Its blocks may go. What nobody hears is counted: a lease ends by itself."""
        if not await self._keep(found, 0.0):
            self._deps.counters.add("releases_unheard")

    async def extend(self, found: Found, keep_s: float) -> Found | None:
        """The lease with more time; None where it was over already, or nobody answers."""
        deadline = self._deps.clock.now() + keep_s
        return replace(found, deadline=deadline) if await self._keep(found, keep_s) else None

    async def _keep(self, found: Found, keep_s: float) -> bool:
        order, deadline = Lease(lease=found.lease, remaining_s=keep_s), self._deps.clock.now() + self._settings.answer_s
        try:
            return (await self._ask(found.peer, subjects.LEASE, order, Verdict, deadline)).ok
        except BatonError:
            return False

    async def _lookup_at(self, name: str, peer: str, run: BlockRun, pin_s: float, deadline: float) -> Found | None:
        lease, until = new_room(), self._deps.clock.now() + self._settings.lease_s
        question = Lookup(
            lease=lease,
            namespace=self.namespace,
            first_block=run.first_block,
            keys=run.keys,
            pin_s=pin_s,
            remaining_s=self._settings.lease_s,
        )
        try:
            reply = await self._ask(peer, subjects.LOOKUP, question, LookupReply, deadline)
        except BatonError:
            self._deps.counters.add("lookups_unanswered")
            return None
        if not reply.num_blocks:
            return None
        found = run.part(0, reply.num_blocks)
        return Found(name, peer, lease, found, reply.num_bytes, reply.beneath, until)

    async def _put_all(
        self, name: str, peer: str, run: BlockRun, pages: Sequence[int], tenant: str, pin_s: float
    ) -> PutOutcome:
        """Part by part, as long as the store takes all of each."""
        sent = held = 0
        for start in range(0, len(run.keys), self._settings.put_blocks):
            part = run.part(start, start + self._settings.put_blocks)
            own = pages[start * self._pages_each : (start + len(part.keys)) * self._pages_each]
            try:
                more, there = await self._put_part(peer, part, own, tenant, pin_s)
            except BatonError as error:
                self._deps.counters.add("puts_failed")
                return PutOutcome(name, sent, held, error)
            sent, held = sent + more, held + there
            if there < len(part.keys):
                break
        return PutOutcome(name, sent, held)

    async def _put_part(
        self, peer: str, run: BlockRun, pages: Sequence[int], tenant: str, pin_s: float
    ) -> tuple[int, int]:
        """(blocks sent, leading blocks that are there). One ticket at the store."""
        key, deadline = TicketKey(new_room(), 1), self._deps.clock.now() + self._settings.put_s
        offer = Offer(
            room=key.room,
            generation=key.generation,
            worker=self._deps.peer,
            tenant=tenant,
            namespace=self.namespace,
            parent=run.parent,
            first_block=run.first_block,
            keys=run.keys,
            pin_s=pin_s,
            remaining_s=self._settings.put_s,
        )
        stored = False
        try:
            reply = await self._ask(peer, subjects.OFFER, offer, OfferReply, deadline)
            if reply.status is OfferStatus.REFUSED:
                raise error_from_code(reply.code, reply.message)
            stored = reply.status is not OfferStatus.GRANTED  # then there is nothing to do
            if not stored and reply.link is not None:
                pieces = self._pieces(reply.wanted, pages)
                await self._link.send(key, reply.secret, reply.link, pieces, standing=_BACKGROUND)
                await self._tell_stored(peer, key, deadline)
                stored = True
            return len(reply.wanted), _leading(reply.held, reply.wanted)
        finally:
            await self._link.forget(key)
            if not stored:
                self._deps.spawn(self._cancel(peer, key), "cancel-put")

    async def _tell_stored(self, peer: str, key: TicketKey, deadline: float) -> None:
        components = digests_of(await self._link.sent(key))
        record = Stored(room=key.room, generation=key.generation, components=components)
        while True:
            reply = await self._ask(peer, subjects.STORED, record, StoredReply, deadline)
            if reply.status is CommitStatus.COMMITTED:
                return
            if reply.status is not CommitStatus.PENDING:
                raise error_from_code(reply.code or StoreError.code, reply.message)

    def _pieces(self, wanted: Sequence[int], pages: Sequence[int]) -> tuple[Piece, ...]:
        each = self._pages_each
        units = tuple(page for k in wanted for page in pages[k * each : (k + 1) * each])
        paged = (k for k, c in enumerate(self._layout.components) if c.index is IndexKind.PAGE)
        return tuple(Piece(k, 0, units, self._layout.page_tokens) for k in paged)

    def _bytes_of(self, num_blocks: int) -> list[tuple[str, int]]:
        pages = num_blocks * self._pages_each
        return [
            (c.name, pages * c.unit_bytes * c.num_layers if c.index is IndexKind.PAGE else 0)
            for c in self._layout.components
        ]

    async def _cancel(self, peer: str, key: TicketKey) -> None:
        order = Cancel(room=key.room, generation=key.generation, reason="the worker gave it up")
        try:
            await self._ask(peer, subjects.CANCEL, order, Verdict, self._deps.clock.now() + _CANCEL_S)
        except BatonError:
            self._deps.counters.add("cancels_unheard")

    async def _ask(self, peer: str, verb: str, message: WireModel, answer: type[R], deadline: float) -> R:
        where = subjects.subject("kvstore", peer, verb)
        try:
            return await ask(self._deps.bus, self._deps.clock, where, message, answer, deadline=deadline)
        except BatonError as error:
            raise StoreUnavailable(f"{peer}: {error.message}") from error


def _leading(held: int, wanted: Sequence[int]) -> int:
    """How many leading blocks there are once the wanted ones have come as well."""
    for k in wanted:
        if k > held:
            break
        held = max(held, k + 1)
    return held
