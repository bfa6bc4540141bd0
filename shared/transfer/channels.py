"""Channels to other sidecars: made by the first backend that reaches the peer, and kept for its next hand-off."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from shared.protocol.reports import LinkAddress
from shared.runtime.errors import PeerLost, TransferError
from shared.transfer.backend import Backend, Channel
from shared.transfer.quiet_threads import Threads

_IDLE_S = 10.0
"""How long a channel that nobody uses stays open. A connection costs more than a small hand-off, but many hand-offs at
once leave many of them, each with open files here and a thread at the peer."""
Entry = tuple[Backend, Channel]
T = TypeVar("T")


class Channels:
    """On the loop. `backends` in order of preference; what blocks runs in `threads`."""

    def __init__(self, backends: tuple[Backend, ...], threads: ThreadPoolExecutor) -> None:
        self._backends, self._threads = backends, threads
        self._idle: dict[str, list[Entry]] = {}
        """By the boot of the peer: one that restarts never comes back under the old one."""
        self._expiries: dict[Channel, asyncio.TimerHandle] = {}

    async def take(self, address: LinkAddress) -> Entry:
        """One that nobody uses, which is the caller's until it gives it back. Raises PeerLost where no backend of ours
        reaches the peer, TransferRefused where it does not want us."""
        while (entry := self._pop(address.boot_id)) is not None:
            if entry[1].is_idle():
                return entry
            entry[1].close()
        lost: PeerLost | None = None
        for backend in self._backends:
            if not backend.reaches(address):
                continue
            try:
                return backend, await self._connect(backend, address)
            except PeerLost as error:
                lost = error
        offered = ", ".join(address.backends) or "none"
        raise lost or PeerLost(f"no backend of ours reaches the peer, which offers {offered}")

    def keep(self, boot_id: str, entry: Entry) -> None:
        """It is of no use now, but works."""

        def expire() -> None:
            del self._expiries[entry[1]]
            idle = self._idle[boot_id]
            idle.remove(entry)
            if not idle:
                del self._idle[boot_id]
            entry[1].close()

        self._idle.setdefault(boot_id, []).append(entry)
        self._expiries[entry[1]] = asyncio.get_running_loop().call_later(_IDLE_S, expire)

    def close(self) -> None:
        """Those that are in use stay their users'."""
        for boot_id in list(self._idle):
            while (entry := self._pop(boot_id)) is not None:
                entry[1].close()

    def _pop(self, boot_id: str) -> Entry | None:
        idle = self._idle.get(boot_id)
        if idle is None:
            return None
        entry = idle.pop()
        if not idle:
            del self._idle[boot_id]
        self._expiries.pop(entry[1]).cancel()
        return entry

    async def _connect(self, backend: Backend, address: LinkAddress) -> Channel:
        opened: list[Channel] = []

        def connect() -> Channel:
            opened.append(backend.connect(address))
            return opened[0]

        try:
            return await in_thread(self._threads, connect, lambda: None)
        except asyncio.CancelledError:
            for channel in opened:
                channel.close()
            raise


async def in_thread(
    threads: Threads,
    work: Callable[[], T],
    abort: Callable[[], None],
    keep: Callable[[Future[T]], None] = lambda job: None,
) -> T:
    """Runs `work` in a thread. If we are cancelled it is told to stop and waited for: it reads our pages. keep: is
    given the job; TransferError if somebody cancels that before it has begun."""
    job = threads.submit(work)
    keep(job)
    running = asyncio.wrap_future(job)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if running.cancelled():
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise TransferError("aborted before it began") from None
            raise
        abort()
        job.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()
        raise
