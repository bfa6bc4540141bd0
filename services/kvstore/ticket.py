"""What is under way: a put, and a load, each from the question until nothing of it is held any more."""

import asyncio
import secrets
from collections.abc import Mapping

from services.kvstore.entries import Entry
from services.kvstore.leases import Lease
from services.kvstore.namespace import Namespace
from services.kvstore.tier import Held
from shared.protocol.messages import CommitStatus
from shared.protocol.store_messages import (
    Load,
    LoadReply,
    LoadStatus,
    Offer,
    OfferReply,
    OfferStatus,
    Stored,
    StoredReply,
)
from shared.runtime.errors import BatonError
from shared.runtime.scope import EndScope
from shared.transfer.link import TicketKey

_SECRET_BYTES = 32


class Put:
    """wanted: place in the offer -> entry, in that order; the ticket's k-th block is the k-th of them. opened: may be
    answered. record, answer: the worker's word and ours."""

    def __init__(
        self, order: Offer, namespace: Namespace, wanted: Mapping[int, Entry], held_blocks: int, deadline: float
    ) -> None:
        self.order, self.namespace, self.deadline = order, namespace, deadline
        self.key = TicketKey(order.room, order.generation)
        self.wanted = dict(wanted)
        self.held_blocks = held_blocks
        self.blocks = [(entry, entry.held) for entry in wanted.values() if entry.held is not None]
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self.scope = EndScope()
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.record: asyncio.Future[Stored] = loop.create_future()
        self.answer: asyncio.Future[StoredReply] = loop.create_future()

    @property
    def units(self) -> list[int]:
        return [held.unit for _, held in self.blocks]

    def reply(self, remaining_s: float) -> OfferReply:
        return OfferReply(
            status=OfferStatus.GRANTED,
            wanted=tuple(self.wanted),
            held=self.held_blocks,
            link=self.namespace.link.address,
            secret=self.secret,
            remaining_s=remaining_s,
        )

    def committed(self) -> None:
        self._decide(StoredReply(status=CommitStatus.COMMITTED))

    def failed(self, error: BatonError) -> None:
        """The first cause is kept."""
        self._decide(StoredReply(status=CommitStatus.FAILED, code=error.code, message=error.message))

    def end(self, error: BatonError) -> None:
        """Ends the put, unless it is decided."""
        self.failed(error)
        self.scope.end()

    def _decide(self, reply: StoredReply) -> None:
        if not self.answer.done():
            self.answer.set_result(reply)
        if not self.opened.done():
            self.opened.set_result(None)


class LoadTicket:
    """lease: counted in its `loads` as long as this lives."""

    def __init__(self, order: Load, namespace: Namespace, lease: Lease[Entry], deadline: float) -> None:
        self.order, self.namespace, self.lease, self.deadline = order, namespace, lease, deadline
        self.key = TicketKey(order.room, order.generation)
        self.scope = EndScope()
        self.sent = 0
        self.reading: list[Held] = []
        self.answer: asyncio.Future[LoadReply] = asyncio.get_running_loop().create_future()

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.lease.entries[: self.order.num_blocks]

    def done(self, reply: LoadReply) -> None:
        if not self.answer.done():
            self.answer.set_result(reply)

    def failed(self, error: BatonError) -> None:
        self.done(LoadReply(status=LoadStatus.FAILED, code=error.code, message=error.message))

    def end(self, error: BatonError) -> None:
        """Ends the load, unless it is decided."""
        self.failed(error)
        self.scope.end()
