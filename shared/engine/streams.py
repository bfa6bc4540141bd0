"""What those who iterate a prompt's chunks are told: a bounded queue for each of them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shared.engine.api import ChunkDone
from shared.runtime.errors import BatonError
from shared.transfer.link import TicketKey

ChunkQueue = asyncio.Queue[ChunkDone | BatonError]


class ChunkStreams:
    """At most one for each ticket; what is told to a ticket without one is dropped."""

    def __init__(self) -> None:
        self._queues: dict[TicketKey, ChunkQueue] = {}

    @contextmanager
    def opened(self, key: TicketKey, max_chunks: int) -> Iterator[ChunkQueue]:
        """max_chunks: more are never told before they are taken."""
        queue: ChunkQueue = asyncio.Queue(max_chunks + 1)  # and how it failed
        self._queues[key] = queue
        try:
            yield queue
        finally:
            if self._queues.get(key) is queue:
                del self._queues[key]

    def __contains__(self, key: TicketKey) -> bool:
        return key in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    def put(self, key: TicketKey, chunk: ChunkDone) -> None:
        if (queue := self._queues.get(key)) is not None:
            queue.put_nowait(chunk)

    def fail(self, key: TicketKey, error: BatonError) -> None:
        queue = self._queues.get(key)
        if queue is not None and not queue.full():
            queue.put_nowait(error)

    def fail_all(self, error: BatonError) -> None:
        for key in self._queues:
            self.fail(key, error)
