"""A sidecar among real processes: its reports, its life with its worker, and a NATS that comes and goes."""

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil

from shared.bus import nats
from shared.bus.base import Message
from shared.bus.server import NatsServer
from shared.protocol import subjects
from shared.protocol.reports import WorkerReport
from shared.protocol.wire import decode
from shared.transfer.link import Piece
from shared.transfer.sidecar_options import SidecarOptions
from tests.contract.transfer_links import Side, new_ticket, sidecar_side
from tests.support_client import is_alive

TABLE = ((3, 4, 9), (), (), ())
PIECES = (Piece(0, 0, (7, 8, 2), 3),)
WORKER = """
    import asyncio, sys
    from pathlib import Path
    from tests.contract.transfer_links import sidecar_side
    from shared.transfer.sidecar_link import SidecarOptions

    async def main():
        side = await sidecar_side(SidecarOptions("orphan", Path(sys.argv[1])))
        print(side.link.pid, flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
"""


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def move(sender: Side, receiver: Side) -> None:
    key, secret = new_ticket()
    await receiver.link.open(key, secret, TABLE, lambda _key: None)
    await sender.link.send(key, secret, receiver.link.address, PIECES)
    assert await receiver.link.received(key) == await sender.link.sent(key)
    await receiver.link.fence(key)
    await sender.link.forget(key)


async def test_reports_show_where_it_is_and_what_it_moved(nats_url: str, tmp_path: Path) -> None:
    bus = await nats.connect(nats_url, "test")
    reports: dict[str, WorkerReport] = {}

    async def heard(message: Message) -> None:
        report = decode(WorkerReport, message.data)
        reports[report.id] = report

    await bus.subscribe(subjects.all_heartbeats(), heard)
    options = SidecarOptions("reporting", tmp_path, nats={"BATON_SIDECAR_NATS_URL": nats_url})
    side, peer = await sidecar_side(options), await sidecar_side(SidecarOptions("peer", tmp_path))
    key, secret = new_ticket()
    await side.link.open(key, secret, TABLE, lambda _key: None)
    await peer.link.send(key, secret, side.link.address, PIECES)

    def landed() -> bool:
        report = reports.get("reporting")
        return report is not None and report.counters.get("landed") == 1

    await until(landed)
    report = reports["reporting"]
    assert (report.role, report.pid, report.boot_id) == ("sidecar", side.link.pid, side.link.address.boot_id)
    assert report.link == side.link.address
    assert report.tickets["filling"] == 1
    assert report.counters["received_shm_bytes"] == 11 * 120 * 3
    assert "peer" not in reports
    await side.close()
    await peer.close()
    await bus.close()


async def test_bytes_move_while_nats_is_away_and_reports_come_back(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    await server.start()
    url = server.url
    await server.stop()
    (tmp_path / "ipc").mkdir()
    options = SidecarOptions("lonely", tmp_path / "ipc", nats={"BATON_SIDECAR_NATS_URL": url})
    sender, receiver = await sidecar_side(options), await sidecar_side(options)
    await move(sender, receiver)
    await server.start()
    bus = await nats.connect(url, "test")
    heard: set[str] = set()

    async def hear(message: Message) -> None:
        heard.add(decode(WorkerReport, message.data).boot_id)

    await bus.subscribe(subjects.all_heartbeats(), hear)
    await until(lambda: len(heard) == 2)
    await server.stop()
    await move(sender, receiver)
    assert receiver.restarts == sender.restarts == []
    await bus.close()
    await sender.close()
    await receiver.close()


async def test_a_sidecar_ends_with_its_worker(tmp_path: Path) -> None:
    code = textwrap.dedent(WORKER)
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path), stdout=subprocess.PIPE)
    assert worker.stdout is not None
    pid = int(await worker.stdout.readline())
    sidecar = psutil.Process(pid)
    worker.kill()
    await worker.wait()
    await until(lambda: not is_alive(sidecar))
    assert os.listdir(tmp_path) == []


async def test_no_torch_comes_near_a_sidecar() -> None:
    modules = "services.sidecar.__main__, services.sidecar.server, services.sidecar.reports"
    code = f"import sys, {modules}; print([name for name in ('torch', 'numba') if name in sys.modules])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.strip() == b"[]"


def test_a_sidecar_by_hand_is_explained() -> None:
    def serve(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.cli", "serve", "sidecar", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert serve().returncode == 1
    assert "started by its worker" in serve("--transfer", "tcp").stderr
    helped = serve("--help")
    assert helped.returncode == 0
    assert "--stall-timeout-s" in helped.stdout
