"""A prefill worker's engine and sidecar and a decode worker's sidecar, without the messages between them: what of a
prompt's computing hides the way of its state.

It follows `services/prefill/flow.py`: what the engine yields is sent at once, and the engine goes on meanwhile.
"""

import asyncio
import itertools
import mmap
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.peers.lines import prompt
from kernels.cpu.ops import warm_up
from services.prefill.ticket import UnderWay
from shared.engine.api import Engine, StepOutput
from shared.engine.engine import BatchEngine
from shared.engine.executor import ThreadExecutor
from shared.engine.models.registry import load_model
from shared.engine.pool import StatePool
from shared.engine.sampler import sample
from shared.engine.settings import EngineSettings, plan_layout
from shared.protocol.messages import SamplingSpec, overlap_of
from shared.runtime.clock import LoopClock
from shared.runtime.overlap import Cut
from shared.state.layout import PoolLayout
from shared.transfer.formats.catalog import DEFAULT
from shared.transfer.link import Piece, TicketKey
from shared.transfer.pool import create_pool
from shared.transfer.sidecar_link import SidecarLink
from shared.transfer.sidecar_options import SidecarOptions

_PAGE_TOKENS = 16
_COMPILE_S = 120.0
_LOOK_S = 0.01
_SECRET = b"benchmark-secret"
_GREEDY = SamplingSpec(seed=0, temperature=0.0, max_tokens=1, ignore_eos=True)
_rooms = itertools.count(1)
T = TypeVar("T")
Inside = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Handoff:
    """Seconds. compute_s: of the prompt. exposed_s: from its end until the receiver had confirmed everything. moved_s:
    while some of it was on its way. landed: part of the bytes that the receiver had, by its own count, when the last
    chunk's computing began."""

    compute_s: float
    exposed_s: float
    moved_s: float
    landed: float
    num_bytes: int

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def overlap(self) -> float:
        return overlap_of(self.compute_s, self.exposed_s, self.moved_s) or 0.0


@dataclass(slots=True)
class HandoffEnds:
    """Both ends. ends_s: when each step of the engine ended."""

    engine: Engine
    sender: SidecarLink
    receiver: SidecarLink
    layout: PoolLayout
    ends_s: list[float]
    clock: LoopClock = field(default_factory=LoopClock)

    async def run(self, length: int, seed: int, cut: Cut) -> Handoff:
        key, tokens = TicketKey(next(_rooms), 1), tuple(prompt(length, seed))
        tables = tuple(tuple(range(one.num_units(length))) for one in self.layout.components)
        await self.receiver.open(key, _SECRET, tables, lambda _key: None)
        before = await self._received_bytes()
        self.ends_s.clear()
        self.engine.reserve(key, tokens, _GREEDY, decodes=False)
        seen: list[tuple[float, int]] = []
        looking = asyncio.get_running_loop().create_task(self._look(seen))
        moving = UnderWay()

        async def send(pieces: tuple[Piece, ...]) -> None:
            with moving.span(self.clock):
                await self.sender.send(key, _SECRET, self.receiver.address, pieces, DEFAULT)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as sends:
            async for chunk in self.engine.prefill(key, cut):
                if chunk.pieces:
                    sends.create_task(send(chunk.pieces))
        done = time.perf_counter()
        looking.cancel()
        received, computed = await self._received_bytes() - before, self.ends_s[-1]
        if await self.receiver.received(key) != await self.sender.sent(key):
            raise RuntimeError("what landed is not what was sent")
        last_began = self.ends_s[-2] if len(self.ends_s) > 1 else began
        landed = max((count for at, count in seen if at <= last_began), default=before) - before
        await self.engine.retire(key)
        await self.receiver.fence(key)
        await self.sender.forget(key)
        return Handoff(computed - began, done - computed, moving.total_s, landed / received, received)

    async def _look(self, seen: list[tuple[float, int]]) -> None:
        while True:
            count = await self._received_bytes()
            seen.append((time.perf_counter(), count))
            await asyncio.sleep(_LOOK_S)

    async def _received_bytes(self) -> int:
        counters = await self.receiver.counters()
        return sum(counters.get(f"received_{name}_bytes", 0) for name in ("shm", "tcp"))


@asynccontextmanager
async def handoff_ends(
    model_directory: Path,
    directory: Path,
    transfer: str,
    *,
    threads: int,
    longest: int,
    inside: Inside = lambda index: nullcontext(),
    hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
) -> AsyncIterator[HandoffEnds]:
    """inside(index): where the sidecar of the sender (0) or the receiver (1) is started."""
    executor = ThreadExecutor(threads)
    await asyncio.wrap_future(executor.submit(warm_up))
    model = await asyncio.wrap_future(executor.submit(lambda: load_model(model_directory)))
    settings = EngineSettings(page_tokens=_PAGE_TOKENS, num_pages=2 * (longest // _PAGE_TOKENS + 1), max_running=1)
    pool = StatePool(plan_layout(model, settings))
    ends_s: list[float] = []

    def listen(output: StepOutput) -> None: ...

    engine = BatchEngine(model, pool, settings, _Clocked(executor, ends_s), listen, sample_rows=sample)
    theirs = create_pool(pool.layout)
    np.frombuffer(mmap.mmap(theirs, pool.layout.total_bytes), dtype=np.uint8)[:] = 0
    async with AsyncExitStack() as stack:
        stack.callback(os.close, theirs)
        stack.callback(pool.close)
        links = []
        for index, (name, fd) in enumerate((("sender", pool.fd), ("receiver", theirs))):
            options = SidecarOptions(name, directory / name, transfer=transfer, tcp_host=hosts[index])
            if transfer == "shm":
                options = SidecarOptions(name, directory, transfer=transfer)
            with inside(index):
                link = await SidecarLink.start(options, fd, pool.layout)
            stack.push_async_callback(link.close)
            links.append(link)
        running = asyncio.get_running_loop().create_task(engine.run())
        stack.push_async_callback(_end, engine, running)
        async with asyncio.timeout(_COMPILE_S):
            for link in links:
                while not (await link.counters())["compiled"]:  # noqa: ASYNC110 - a sidecar tells nobody
                    await asyncio.sleep(0.05)
        yield HandoffEnds(engine, *links, pool.layout, ends_s)


async def _end(engine: BatchEngine, running: asyncio.Task[None]) -> None:
    await engine.close()
    await running


class _Clocked:
    """The compute thread, and when each of its steps ended."""

    def __init__(self, executor: ThreadExecutor, ends_s: list[float]) -> None:
        self._executor, self._ends_s = executor, ends_s
        self.tell, self.close, self.submit = executor.tell, executor.close, executor.submit

    async def run(self, work: Callable[[], T]) -> T:
        def timed() -> T:
            result = work()
            self._ends_s.append(time.perf_counter())
            return result

        return await self._executor.run(timed)
