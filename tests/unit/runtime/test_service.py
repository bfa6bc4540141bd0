"""The life of a process: ready and ended in order, heard on the bus, and which failures end it."""

import asyncio
import signal
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from shared.bus.base import Message
from shared.bus.memory import MemoryBus, MemoryHub
from shared.protocol import subjects
from shared.protocol.reports import WorkerReport
from shared.protocol.wire import decode
from shared.runtime import service
from shared.runtime.clock import LoopClock
from shared.runtime.errors import BatonError
from shared.runtime.heartbeat import Heartbeat
from shared.runtime.loop_watch import LoopWatch
from shared.runtime.process import EXIT_CONFIG, main
from shared.runtime.service import Service
from shared.runtime.settings import KvstoreSettings, load_settings
from shared.runtime.tasks import TaskOwner

DEADLINE_S = 10.0


class Store(Service):
    role = "kvstore"

    def __init__(self, bus: MemoryBus, **settings: object) -> None:
        super().__init__(load_settings(KvstoreSettings, settings), bus=bus)
        self.began = asyncio.Event()
        self.may_start = asyncio.Event()
        self.stopped = 0
        self.drained: list[str] = []
        self.ill: str | None = None

    async def start(self) -> None:
        self.began.set()
        await self.may_start.wait()

    async def drain(self) -> None:
        self.drained.append(self.state)

    async def stop(self) -> None:
        self.stopped += 1

    def unhealthy(self) -> str | None:
        return self.ill


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not what():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(store: Store) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run(signals=False))
        await store.began.wait()
        yield task
        store.request_stop()


async def listen(hub: MemoryHub) -> list[WorkerReport]:
    reports: list[WorkerReport] = []

    async def on_report(message: Message) -> None:
        reports.append(decode(WorkerReport, message.data))

    await hub.client("listener").subscribe(subjects.all_heartbeats(), on_report)
    return reports


async def test_a_life_as_others_see_it() -> None:
    hub = MemoryHub()
    reports = await listen(hub)
    store = Store(hub.client("store"))
    async with running(store):
        await until(lambda: reports)
        store.may_start.set()
        await until(lambda: reports[-1].state == "ready")
    assert reports[-1].state == "draining"
    assert store.drained == ["draining"]
    assert [report.sequence for report in reports] == list(range(1, len(reports) + 1))
    assert {report.peer for report in reports} == {store.peer}
    assert store.stopped == 1
    assert store.tasks.num_tasks == 0


async def test_health_and_metrics() -> None:
    store = Store(MemoryHub().client("store"))
    async with running(store), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{store.http_port}"

        async def health() -> tuple[int, dict[str, str]]:
            async with session.get(f"{url}/health") as answer:
                return answer.status, await answer.json()

        assert await health() == (503, {"status": "starting", "id": store.peer, "reason": "the process is starting"})
        store.may_start.set()
        await until(lambda: store.state == "ready")
        assert await health() == (200, {"status": "ready", "id": store.peer})
        store.ill = "it is stuck"
        assert await health() == (503, {"status": "unhealthy", "id": store.peer, "reason": "it is stuck"})
        store.counters.add("stale-generation", 2)
        async with session.get(f"{url}/metrics") as answer:
            text = await answer.text()
        assert 'baton_ready{id="kvstore",role="kvstore"} 1.0' in text
        assert "baton_stale_generation_total 2.0" in text


async def test_a_failed_request_is_counted_and_ends_nothing() -> None:
    store = Store(MemoryHub().client("store"))

    async def fails() -> None:
        raise BatonError("one request")

    async with running(store):
        store.may_start.set()
        await until(lambda: store.state == "ready")
        store.deps().spawn(fails(), "request 1")
        await until(lambda: store.counters["task_failures"] == 1)
        assert store.state == "ready"


async def test_a_failed_vital_part_ends_the_process_in_order() -> None:
    store = Store(MemoryHub().client("store"))

    async def fails() -> None:
        raise BatonError("no engine")

    with pytest.RaisesGroup(pytest.RaisesGroup(pytest.RaisesExc(BatonError, match="no engine"))):
        async with running(store) as task:
            store.may_start.set()
            await until(lambda: store.state == "ready")
            store.tasks.spawn_vital(fails(), "engine")
            await task
    assert store.stopped == 1


async def test_a_start_can_be_given_up() -> None:
    store = Store(MemoryHub().client("store"))
    async with running(store):
        pass
    assert store.stopped == 1
    assert store.drained == []
    assert store.state == "draining"


async def test_draining_too_long_is_cut_and_the_parts_are_ended_all_the_same() -> None:
    class Busy(Store):
        async def drain(self) -> None:
            await asyncio.Event().wait()

    store = Busy(MemoryHub().client("store"), shutdown_timeout_s=0.05)
    async with asyncio.timeout(DEADLINE_S), running(store):
        store.may_start.set()
        await until(lambda: store.state == "ready")
    assert store.stopped == 1


async def test_a_cancelled_drain_ends_the_parts_all_the_same() -> None:
    class Busy(Store):
        async def drain(self) -> None:
            self.drained.append("began")
            await asyncio.Event().wait()

    store = Busy(MemoryHub().client("store"), shutdown_timeout_s=60)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run(signals=False))
        store.may_start.set()
        await until(lambda: store.state == "ready")
        store.request_stop()
        await until(lambda: store.drained)
        task.cancel()
    assert store.stopped == 1


async def test_an_end_that_takes_too_long_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Store):
        async def stop(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(service, "STOP_S", 0.05)
    store = Slow(MemoryHub().client("store"))
    async with asyncio.timeout(DEADLINE_S), running(store):
        store.may_start.set()


async def test_no_nats_server_holds_an_end_up() -> None:
    store = Store(MemoryHub().client("unused"), nats_url="nats://127.0.0.1:9", connect_timeout_s=3600)
    store._bus = None
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(store.run(signals=False))
        await asyncio.sleep(0)
        store.request_stop()
    assert store.stopped == 0


async def test_health_forgives_a_bus_that_is_away_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryHub().client("store")
    store = Store(bus, heartbeat_s=0.05)
    async with running(store):
        store.may_start.set()
        await until(lambda: store.state == "ready")
        bus.cut()
        assert store.bus_trouble() is None
        monkeypatch.setattr(service, "BUS_AWAY_S", 0.2)
        await until(lambda: store.bus_trouble() is not None)
        assert "nats-server has been away" in str(store.bus_trouble())
        bus.mend()
        assert store.bus_trouble() is None


async def test_a_loop_that_stands_still_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    stalls: list[int] = []
    watch = LoopWatch(lambda: stalls.append(1), limit_s=0.2)

    def blocks() -> None:
        time.sleep(0.6)

    for _ in range(2):
        await asyncio.sleep(0.01)
        watch._beat()
        blocks()
    watch.close()
    assert len(stalls) == 2
    assert "in blocks" in caplog.text
    assert "the event loop has stood still for" in caplog.text


async def test_requests_tasks_can_be_waited_for_but_not_for_ever() -> None:
    done: list[str] = []
    never = asyncio.Event()

    async def says(word: str) -> None:
        await asyncio.sleep(0)
        done.append(word)

    async def spawns() -> None:
        await asyncio.sleep(0)
        owner.spawn(says("inner"), "inner")

    async with TaskOwner() as owner:
        owner.spawn_vital(never.wait(), "vital")
        owner.spawn(spawns(), "outer")
        await owner.wait_spawned(DEADLINE_S)
        assert done == ["inner"]
        owner.spawn(never.wait(), "stuck")
        await owner.wait_spawned(0.05)
        assert owner.num_tasks == 2


async def test_reports_are_soon_but_not_a_flood() -> None:
    hub = MemoryHub()
    reports = await listen(hub)
    store = Store(hub.client("store"), heartbeat_s=3600)
    async with TaskOwner() as owner:
        heartbeat = Heartbeat(hub.client("beat"), LoopClock(), store.report, 3600)
        owner.spawn_vital(heartbeat.run(), "heartbeat")
        await until(lambda: len(reports) == 1)
        began = LoopClock().now()
        while (took := LoopClock().now() - began) < 0.3:
            heartbeat.changed()
            await asyncio.sleep(0)
        await asyncio.sleep(0.06)
        assert 2 <= len(reports) - 1 <= took / 0.05 + 1
        count = len(reports)
        asker = hub.client("gateway")
        await asker.publish(subjects.hello(), b"")
        await until(lambda: len(reports) == count + 1)
        answer = decode(WorkerReport, await asker.request(subjects.hello(), b"", DEADLINE_S))
        assert answer.sequence == count + 2


async def test_a_task_cancelled_before_its_first_step_leaves_no_coroutine_behind() -> None:
    async def never() -> None:
        raise AssertionError

    coroutine = never()
    async with TaskOwner() as owner:
        owner.spawn(coroutine, "never")
    assert coroutine.cr_frame is None


def test_wrong_settings_have_an_exit_status_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(KvstoreSettings, lambda _: pytest.fail("not reached"), ["--heartbeat-s", "0"])
    assert ended.value.code == EXIT_CONFIG
    said = capsys.readouterr().err
    assert "kvstore: heartbeat_s: Input should be greater than 0 (got '0' from --heartbeat-s)" in said


async def test_signals_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(MemoryHub().client("store"))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.run())
        await store.began.wait()
        store.may_start.set()
        await until(lambda: store.state == "ready")
        signal.raise_signal(signal.SIGTERM)
        await task
    assert store.stopped == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    guards = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(guard.finished.is_set() for guard in guards), "a guard is left"


PROGRAM = """
    import asyncio, sys, threading
    from shared.runtime.process import main
    from shared.runtime.service import Service
    from shared.runtime.settings import KvstoreSettings
    from shared.bus.memory import MemoryHub

    class Store(Service):
        role = "kvstore"
        serves_http = False

        async def start(self):
            print("starting", flush=True)
            if {starts_slowly}:
                await asyncio.to_thread(threading.Event().wait)  # what prepares a model cannot be cancelled

        async def drain(self):
            print("draining", flush=True)
            if {drains_slowly}:
                await asyncio.Event().wait()

        async def stop(self):
            print("stopped", flush=True)

    def build(settings):
        store = Store(settings, bus=MemoryHub().client("store"))
        print("built", flush=True)
        return store

    main(KvstoreSettings, build, ["--shutdown-timeout-s", "30"])
"""


async def start_program(**slow: bool) -> asyncio.subprocess.Process:
    given = {"starts_slowly": False, "drains_slowly": False} | slow
    code = textwrap.dedent(PROGRAM).format(**given)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=pipe, stderr=pipe)


async def said(process: asyncio.subprocess.Process, word: bytes) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        while word not in (line := await process.stdout.readline()):
            assert line, "it ended"


async def test_an_end_while_something_is_still_prepared() -> None:
    process = await start_program(starts_slowly=True)
    await said(process, b"starting")
    process.send_signal(signal.SIGTERM)
    await said(process, b"stopped")
    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(second: signal.Signals) -> None:
    process = await start_program(drains_slowly=True)
    await said(process, b"starting")
    assert process.stderr is not None
    while b"ready" not in await process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    await said(process, b"draining")
    process.send_signal(second)
    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == -second
