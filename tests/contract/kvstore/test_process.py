"""A kvstore as a process of its own, with blocks on a disk, killed at any moment: what is found afterwards is whole."""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from shared.bus.base import Message
from shared.protocol import subjects
from shared.protocol.reports import WorkerReport
from shared.protocol.wire import decode
from shared.store.roster import Roster
from shared.store.runs import BlockRun
from tests.contract.kvstore.world import Worker, World, chain_of, until, world

ROUNDS = 4


@asynccontextmanager
async def kvstore(made: World, directory: Path) -> AsyncIterator[Process]:
    """Left in any way it is dead."""
    flags = {
        "--nats-url": made.nats_url,
        "--ipc-dir": made.directory,
        "--state-dir": directory,
        "--memory-mib": 1,
        "--log-level": "warning",
        "--name": "on-disk",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.kvstore", *(str(part) for pair in flags.items() for part in pair)
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def known(worker: Worker, chain: tuple[bytes, ...], rows: list[bytes]) -> int:
    """How many leading blocks are found, all of which can be loaded, and are right."""
    found = await worker.find(chain)
    if found is None:
        return 0
    own = worker.pages_for(len(chain), start=99)
    reply = await worker.load(found, own)
    assert reply.num_blocks == found.num_blocks
    assert worker.rows(own)[: reply.num_blocks] == rows[: reply.num_blocks]
    await worker.client.release(found)
    return reply.num_blocks


async def test_it_is_killed_at_any_moment(nats_url: str, tmp_path: Path) -> None:
    random, directory = Random(7), tmp_path / "state"
    async with world(nats_url, tmp_path / "ipc", "auto") as made:
        (tmp_path / "ipc").mkdir()
        putter, loader = await made.add_worker(16), await made.add_worker(32)
        roster, reports = Roster(putter.deps), list[WorkerReport]()

        async def on_report(message: Message) -> None:
            reports.append(decode(WorkerReport, message.data))

        await putter.deps.bus.subscribe(subjects.heartbeats_of("kvstore"), on_report)
        await roster.start()
        for worker in (putter, loader):
            worker.client._stores = lambda: {name: peer for name, peer in roster.stores().items() if name == "on-disk"}
        pages = putter.pages_for(6)
        chains, rows = [chain_of(f"round {k}", 6) for k in range(ROUNDS)], dict[int, list[bytes]]()
        for turn in range(ROUNDS + 1):
            async with kvstore(made, directory) as process:
                await until(lambda pid=process.pid: any(one.pid == pid and one.state == "ready" for one in reports))
                peers = {one.peer for one in reports if one.pid == process.pid}
                await until(lambda peers=peers: roster.stores().get("on-disk") in peers)
                for k in range(turn):
                    assert await known(loader, chains[k], rows[k]) >= (6 if k == 0 else 0)
                if turn == ROUNDS:
                    break
                putter.side.scramble()
                rows[turn] = putter.rows(pages)
                putting = made.tasks.spawn(putter.client.put(BlockRun.of(chains[turn]), pages), "put")
                if turn == 0:  # the first is seen through to the disk
                    await until(lambda: reports[-1].counters.get("blocks_beneath") == 6)
                    assert "survives the kvstore's end" in reports[-1].durability
                else:
                    await asyncio.sleep(random.random() * 0.2)
                process.kill()
                await process.wait()
                await putting
        await roster.stop()


@pytest.mark.parametrize("driver", ["disc", "disk"])
async def test_a_driver_that_cannot_be_had_is_told_at_once(nats_url: str, tmp_path: Path, driver: str) -> None:
    where = tmp_path / "file"
    where.write_text("not a directory")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.kvstore", "--nats-url", nats_url, "--driver", driver),
        *("--driver-where", str(where), "--state-dir", str(tmp_path)),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"BATON_LOG_FORMAT": "bare"},
    )
    async with asyncio.timeout(60):
        _, said = await process.communicate()
    assert process.returncode == (78 if driver == "disc" else 1)
    assert ("disc" if driver == "disc" else str(where)) in said.decode()
