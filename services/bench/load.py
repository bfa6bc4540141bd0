"""Drives a client through a workload: a closed load keeps N streams busy, an open one sends at the planned times."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

from services.bench.figures.records import RequestRecord
from services.bench.plan.workload import PlannedRequest, Workload

OnRecord = Callable[[RequestRecord], None]
_PAUSE_AFTER_FAILURE_S = 0.1


class Sender(Protocol):
    """What `Client` is to a load."""

    now: Callable[[], float]

    async def send(self, planned: PlannedRequest, record: RequestRecord, began: float) -> None: ...


class Load:
    """One run. streams: requests in flight at most. A closed load sends nothing after duration_s, and a stream whose
    request failed pauses for 0.1 s. An open load that has `streams` in flight does not send the next: it is recorded as
    an error of ours, so that a run never says that it sent what it did not."""

    def __init__(self, sender: Sender, workload: Workload, streams: int, on_record: OnRecord) -> None:
        self._sender = sender
        self._workload = workload
        self._streams = streams
        self._on_record = on_record
        self._began = 0.0
        self._in_flight = 0
        self.records: list[RequestRecord] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when all have been answered. Once `stop` is set, what is in flight is cancelled and recorded so."""
        self._began = self._sender.now()
        async with asyncio.TaskGroup() as tasks:
            driving = tasks.create_task(self._drive())
            stopping = tasks.create_task(_cancel_when(stop, driving))
            await asyncio.wait([driving])
            stopping.cancel()
        self.records.sort(key=lambda record: record.number)

    @property
    def elapsed_s(self) -> float:
        return self._sender.now() - self._began

    async def _drive(self) -> None:
        plan = iter(self._workload)
        async with asyncio.TaskGroup() as tasks:
            first = next(plan, None)
            if first is None:
                return
            if first.at_s is not None:
                await self._pace(first, plan, tasks)
                return
            tasks.create_task(self._stream(first, plan))
            for _ in range(self._streams - 1):
                tasks.create_task(self._stream(None, plan))

    async def _stream(self, planned: PlannedRequest | None, plan: Iterator[PlannedRequest]) -> None:
        """One of a closed load's streams."""
        limit_s = self._workload.duration_s
        while limit_s is None or self.elapsed_s < limit_s:
            planned = planned or next(plan, None)
            if planned is None:
                return
            record = await self._send(planned)
            if record.outcome != "ok":
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
            planned = None

    async def _pace(self, first: PlannedRequest, plan: Iterator[PlannedRequest], tasks: asyncio.TaskGroup) -> None:
        planned: PlannedRequest | None = first
        while planned is not None:
            await asyncio.sleep(max(0.0, (planned.at_s or 0.0) - self.elapsed_s))
            if self._in_flight >= self._streams:
                self._refuse(planned)
            else:
                tasks.create_task(self._send(planned))
            planned = next(plan, None)

    async def _send(self, planned: PlannedRequest) -> RequestRecord:
        now_s = self.elapsed_s
        record = RequestRecord(planned.number, now_s if planned.at_s is None else planned.at_s, now_s)
        self._in_flight += 1
        try:
            await self._sender.send(planned, record, self._began)
        finally:
            self._in_flight -= 1
            self._note(record)
        return record

    def _refuse(self, planned: PlannedRequest) -> None:
        now_s = self.elapsed_s
        record = RequestRecord(planned.number, planned.at_s or now_s, now_s, outcome="error", ended_s=now_s)
        record.error = f"not sent: {self._streams} in flight"
        self._note(record)

    def _note(self, record: RequestRecord) -> None:
        self.records.append(record)
        self._on_record(record)


async def _cancel_when(stop: asyncio.Event, task: "asyncio.Task[None]") -> None:
    await stop.wait()
    task.cancel()
