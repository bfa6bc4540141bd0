"""Asks a Baton gateway about its cluster while a load runs: one small request a second."""

import asyncio
import time
from collections.abc import Callable

import aiohttp

from services.bench.figures.cluster import ClusterHistory, WorkerSample, read_cluster, read_cpu_s
from services.bench.wire.client import Target

_EVERY_S = 1.0
_LAST_WORD_S = 5.0
_POLL_S = 0.1
_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class ClusterSampler:
    """`run` until cancelled, then `finish`. A question that fails is a sample less, and nothing more."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._session = session
        self._target = target
        self._now = now
        self._began = now()
        self.history = ClusterHistory()

    async def run(self) -> None:
        await self._note_cpu()
        while True:
            self._keep(await self._sample())
            await asyncio.sleep(_EVERY_S)

    async def finish(self) -> None:
        """Until all workers have spoken once more, so that the last second of the run counts too."""
        await self._note_cpu()
        ended_s = self._elapsed_s
        last: list[WorkerSample] = []
        while self._elapsed_s < ended_s + _LAST_WORD_S:
            last = await self._sample() or last
            if last and all(worker.at_s >= ended_s for worker in last):
                break
            await asyncio.sleep(_POLL_S)
        self.history.last = last

    def _keep(self, sample: list[WorkerSample]) -> None:
        if sample:
            self.history.samples.append(sample)

    @property
    def _elapsed_s(self) -> float:
        return self._now() - self._began

    async def _sample(self) -> list[WorkerSample]:
        try:
            async with self._session.get(
                f"{self._target.url}/cluster", headers=self._target.headers, timeout=_TIMEOUT
            ) as response:
                return read_cluster(await response.json(content_type=None), self._elapsed_s)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return []

    async def _note_cpu(self) -> None:
        try:
            async with self._session.get(f"{self._target.url}/metrics", timeout=_TIMEOUT) as response:
                cpu_s = read_cpu_s(await response.text(errors="replace"))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return
        if cpu_s is not None:
            self.history.gateway_cpu_s.append((self._elapsed_s, cpu_s))
