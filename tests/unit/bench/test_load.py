"""Who is sent when, on virtual time, to a server that takes one second for each request."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.bench.figures.records import RequestRecord
from services.bench.load import Load
from services.bench.plan.workload import PlannedRequest
from tests.sim.virtual_time import run_virtual


@dataclass
class Plan:
    times: list[float | None]
    duration_s: float | None = None

    @property
    def num_requests(self) -> int:
        return len(self.times)

    def __iter__(self) -> Iterator[PlannedRequest]:
        return (PlannedRequest(number, at_s, "prompt", 1) for number, at_s in enumerate(self.times))


@dataclass
class OneSecondServer:
    failing: bool = False
    in_flight: int = 0
    most: int = 0
    sent: list[int] = field(default_factory=list)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def send(self, planned: PlannedRequest, record: RequestRecord, began: float) -> None:
        self.sent.append(planned.number)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0.0 if self.failing else 1.0)
        finally:
            self.in_flight -= 1
        record.outcome, record.ended_s = "error" if self.failing else "ok", self.now() - began


async def play(server: OneSecondServer, plan: Plan, streams: int, stop_after_s: float | None = None) -> Load:
    stop, told = asyncio.Event(), []
    load = Load(server, plan, streams, told.append)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(load.run(stop))
        if stop_after_s is not None:
            await asyncio.sleep(stop_after_s)
            stop.set()
        await running
    assert sorted(record.number for record in told) == [record.number for record in load.records]
    assert server.in_flight == 0
    return load


def run(main: Coroutine[Any, Any, Load]) -> Load:
    return run_virtual(main)


def test_a_closed_load_keeps_its_streams_busy() -> None:
    server = OneSecondServer()
    load = run(play(server, Plan([None] * 10), streams=4))
    assert (server.sent, server.most) == (list(range(10)), 4)
    assert [record.sent_s for record in load.records] == [0.0] * 4 + [1.0] * 4 + [2.0] * 2
    assert {record.outcome for record in load.records} == {"ok"}


def test_more_streams_than_requests() -> None:
    server = OneSecondServer()
    run(play(server, Plan([None] * 2), streams=8))
    assert server.sent == [0, 1]


def test_no_requests_at_all() -> None:
    assert run(play(OneSecondServer(), Plan([]), streams=2)).records == []


def test_a_closed_load_sends_nothing_after_its_duration_and_waits_for_what_it_sent() -> None:
    load = run(play(OneSecondServer(), Plan([None] * 100, duration_s=2.5), streams=2))
    assert len(load.records) == 6
    assert [record.ended_s for record in load.records[-2:]] == [3.0, 3.0]


def test_streams_pause_after_failures() -> None:
    server = OneSecondServer(failing=True)
    load = run(play(server, Plan([None] * 1000, duration_s=1.0), streams=1))
    assert len(load.records) == pytest.approx(10, abs=1)


def test_an_open_load_does_not_wait_for_answers() -> None:
    server = OneSecondServer()
    load = run(play(server, Plan([0.1, 0.2, 0.3, 5.0]), streams=100))
    assert server.most == 3
    assert [record.sent_s for record in load.records] == pytest.approx([0.1, 0.2, 0.3, 5.0])
    assert [record.planned_s for record in load.records] == [0.1, 0.2, 0.3, 5.0]


def test_an_open_load_says_what_it_did_not_send() -> None:
    server = OneSecondServer()
    load = run(play(server, Plan([0.1, 0.2, 0.3, 2.0]), streams=2))
    assert server.sent == [0, 1, 3]
    refused = load.records[2]
    assert (refused.outcome, refused.error, refused.status) == ("error", "not sent: 2 in flight", None)


@pytest.mark.parametrize("times", [[None] * 9, [0.5 * k for k in range(9)]], ids=["closed", "open"])
def test_stopped_early_it_keeps_what_it_has(times: list[float | None]) -> None:
    server = OneSecondServer()
    load = run(play(server, Plan(times), streams=3, stop_after_s=1.75))
    outcomes = [record.outcome for record in load.records]
    assert outcomes[0] == "ok"
    assert "cancelled" in outcomes
    assert len(server.sent) == len(load.records) < 9
