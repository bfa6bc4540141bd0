"""When all is over nothing may be held anywhere, and nothing may have grown without bound."""

import asyncio

from services.decode.desk import DecodeDesk
from services.prefill.desk import PrefillDesk
from shared.bus.memory import MemoryHub
from tests.sim.cluster import Cluster
from tests.sim.processes import Gateway, Worker
from tests.sim.watch import SLACK_S, Watch

_TELL_S = 6.0
"""Notices to peers that are gone are repeated for a while; their tasks end then."""


async def reached(cluster: Cluster, watch: Watch) -> None:
    """Waits until nothing is held. That takes until the last deadline at most; what is held then is a leak."""
    loop = asyncio.get_running_loop()
    deadlines = [ticket.deadline for worker in cluster.workers for ticket in worker.desk.tickets]
    give_up = max([loop.time(), *deadlines]) + SLACK_S + _TELL_S
    while held := list(_held(cluster)):
        if loop.time() > give_up:
            watch.fail("nothing is held when all is over", "; ".join(held))
            return
        await asyncio.sleep(0.1)


def _held(cluster: Cluster) -> list[str]:
    found: list[str] = []
    for worker in cluster.workers:
        found += [f"{worker.name}: {what}" for what in _held_by_worker(worker)]
    for gateway in cluster.gateways:
        found += [f"{gateway.name}: {what}" for what in _held_by_gateway(gateway)]
    for process in cluster.processes:
        if process.tasks.num_tasks > process.idle_tasks:
            found.append(f"{process.name}: {process.tasks.num_tasks - process.idle_tasks} tasks")
    return found + _held_by_hub(cluster.hub)


def _held_by_worker(worker: Worker) -> list[str]:
    found = []
    for name, (total, free, _) in (("pages", worker.engine.pages()), ("slots", worker.engine.slots())):
        if free != total:
            found.append(f"{total - free} {name}")
    engine, desk = worker.engine, worker.desk
    counts = {
        "tickets": len(desk),
        "bytes of host memory": engine.stashed_bytes,
        "tickets at the sidecar": worker.link.num_tickets,
        "streams of the engine": len(engine._streams) + len(engine._released) + len(engine._scheduler.groups),
        "early destinations": len(desk._arrived) + desk._num_held if isinstance(desk, PrefillDesk) else 0,
        "tombstones too many": max(0, len(desk.tickets.ended) - 4096),
        "logs too many": max(0, len(desk.logs) - 128) if isinstance(desk, DecodeDesk) else 0,
    }
    return found + [f"{count} {name}" for name, count in counts.items() if count]


def _held_by_gateway(gateway: Gateway) -> list[str]:
    pending = sum(len(worker.pending) for worker in gateway.registry.all())
    counts = {"letterboxes": len(gateway.inbox), "waiting": gateway.rooms.num_waiting, "pages asked for": pending}
    return [f"{count} {name}" for name, count in counts.items() if count]


def _held_by_hub(hub: MemoryHub) -> list[str]:
    return [f"{hub.num_waiting} requests without an answer"] if hub.num_waiting else []
