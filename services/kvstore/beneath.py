"""What lies beneath the memory: blocks are written through to a driver in the background, and read back when they are
wanted. Serving goes on without it: a driver that is full, slow or away costs hits, never an answer."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from services.kvstore.entries import Entry
from services.kvstore.index import Index
from services.kvstore.namespace import Namespace
from services.kvstore.tier import Held
from shared.runtime.deps import Deps
from shared.runtime.errors import StoreFull, StoreUnavailable
from shared.store.driver import BlockDriver, BlockRecord

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BeneathSettings:
    """max_waiting: blocks that wait to be written; one more is not. width: writes at a time, and reads. timeout_s: how
    long a read is waited for. away_s: how long a driver that failed is left alone."""

    max_waiting: int = 1024
    width: int = 4
    timeout_s: float = 10.0
    away_s: float = 2.0


class Beneath:
    """find: an open namespace by its name. Jobs are tasks of the process; of two for one key the later counts, and
    never do two run at a time."""

    def __init__(
        self,
        deps: Deps,
        driver: BlockDriver,
        index: Index,
        find: Callable[[str], Namespace | None],
        settings: BeneathSettings = BeneathSettings(),
    ) -> None:
        self.driver = driver
        self._deps, self._index, self._find, self._settings = deps, index, find, settings
        self._waiting: OrderedDict[bytes, Literal["write", "delete"]] = OrderedDict()
        self._busy: set[bytes] = set()
        self._reading: dict[bytes, asyncio.Task[None]] = {}
        self._reads = asyncio.Semaphore(settings.width)
        self._away_until = 0.0

    async def open(self) -> None:
        """Afterwards the index knows what the driver has."""
        await self.driver.open()
        async for record in self.driver.records():
            if not record.snapshot:
                self._index.recorded(record, self._deps.clock.now())

    async def close(self) -> None:
        self._waiting.clear()
        await self.driver.close()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._busy)

    @property
    def is_away(self) -> bool:
        """Whether what is only beneath cannot be had now."""
        return self._deps.clock.now() < self._away_until

    def write_soon(self, key: bytes) -> None:
        if len(self._waiting) >= self._settings.max_waiting and self._waiting.get(key) != "write":
            self._deps.counters.add("writes_dropped")
            return
        self._waiting[key] = "write"
        self._pump()

    def delete_soon(self, key: bytes) -> None:
        self._waiting[key] = "delete"
        self._pump()

    def begin_reading(self, entry: Entry) -> "asyncio.Task[None]":
        """Brings a block that is only beneath into memory, where it is found then, unless it got lost; several who ask
        share one reading. Raises StoreFull where nothing makes room for it now, StoreUnavailable while the driver is
        away."""
        task = self._reading.get(entry.key)
        if task is not None:
            return task
        if self.is_away:
            raise StoreUnavailable(f"the driver {self.driver.name} failed a moment ago")
        namespace, held = self._find(entry.namespace), self._index.bring(entry)
        if held is None or namespace is None:
            raise StoreFull("no room in memory for a block from beneath")
        # A task of its own: the driver may write the unit until it says that it does not, whoever waits for it.
        task = self._deps.spawn(self._read(namespace, entry, held), "read-block")
        self._reading[entry.key] = task
        task.add_done_callback(lambda _: self._reading.pop(entry.key, None))
        return task

    async def read(self, entry: Entry) -> None:
        """Waits for it. Raises also StoreUnavailable where the driver does not bring it in time."""
        task = self.begin_reading(entry)
        done, _ = await asyncio.wait({task}, timeout=self._settings.timeout_s)
        if not done:
            self._failed("reads_failed")
            raise StoreUnavailable(f"the driver {self.driver.name} did not bring a block in time")
        if self.is_away and not entry.is_whole:
            raise StoreUnavailable(f"the driver {self.driver.name} does not bring a block")

    async def _read(self, namespace: Namespace, entry: Entry, held: Held) -> None:
        record = None
        try:
            self._index.first_bytes(held, entry.namespace)
            async with self._reads:
                record = await self.driver.get(entry.key, entry.namespace, namespace.parts(held.unit))
            if record is None:
                self._deps.counters.add("blocks_lost_beneath")
                self._index.lost_beneath(entry)
            else:
                self._index.verified(entry, held, record.digest)
                self._deps.counters.add("blocks_read")
        except StoreUnavailable as error:
            self._failed("reads_failed", error)
        finally:
            if record is None:
                self._index.give_up(entry, held)
                self._index.quiesced(held, entry.namespace)

    def _pump(self) -> None:
        for key in list(self._waiting):
            if len(self._busy) >= self._settings.width:
                return
            if key not in self._busy:
                job = self._waiting.pop(key)
                self._busy.add(key)
                self._deps.spawn(self._job(key, job), f"{job}-block")

    async def _job(self, key: bytes, job: Literal["write", "delete"]) -> None:
        try:
            if (pause_s := self._away_until - self._deps.clock.now()) > 0:
                await self._deps.clock.sleep(pause_s)
            if job == "delete":
                await self.driver.delete(key)
            else:
                await self._write(key)
        except StoreFull:
            self._deps.counters.add("writes_refused")
        except StoreUnavailable as error:
            self._failed(f"{job}s_failed", error)
        finally:
            self._busy.discard(key)
            self._pump()
            self._deps.changed()

    async def _write(self, key: bytes) -> None:
        entry = self._index.entries.find(key)
        namespace = None if entry is None else self._find(entry.namespace)
        if entry is None or namespace is None or entry.beneath or not entry.is_whole:
            return  # it has gone meanwhile
        record = BlockRecord(
            key, entry.num_bytes, entry.digest, entry.namespace, entry.tenant, entry.tokens, written_s=time.time()
        )
        held = self._index.enter(entry)
        try:
            parts = namespace.parts(held.unit)
            await self._make_room(entry.num_bytes)
            try:
                await self.driver.put(record, parts)
            except StoreFull:
                if not await self._delete_least(entry.num_bytes):
                    raise
                await self.driver.put(record, parts)
            self._deps.counters.add("blocks_written")
            if self._index.entries.find(key) is entry:
                self._index.written(entry)
            else:
                self.delete_soon(key)
        finally:
            self._index.leave(held, entry.namespace)

    async def _make_room(self, num_bytes: int) -> None:
        used, limit = self.driver.usage()
        if limit is not None and used + num_bytes > limit:
            await self._delete_least(used + num_bytes - limit)

    async def _delete_least(self, num_bytes: int) -> bool:
        keys = self._index.make_room_beneath(num_bytes)
        for key in keys:
            await self.driver.delete(key)
        return bool(keys)

    def _failed(self, counter: str, error: StoreUnavailable | None = None) -> None:
        self._deps.counters.add(counter)
        if not self.is_away:
            _log.warning("the driver %s fails: %s", self.driver.name, error or "it does not answer in time")
        self._away_until = self._deps.clock.now() + self._settings.away_s
