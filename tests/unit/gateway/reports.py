"""Reports of workers, as tests of the gateway make them, and who takes them in."""

from typing import Any

from services.gateway.router import Demand
from services.gateway.workers import WorkerRegistry
from shared.protocol.reports import Geometry, Pages, WorkerReport
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters

GEOMETRY = Geometry(page_tokens=16, components=("kv",), unit_bytes=(1024,))


def report(role: str, name: str, free: int = 100, *, boot: str = "b0", sequence: int = 1, **more: Any) -> WorkerReport:
    values: dict[str, Any] = {
        "role": role,
        "id": name,
        "boot_id": boot,
        "pid": 1,
        "host": "h",
        "state": "ready",
        "identity": "same",
        "geometry": GEOMETRY,
        "pages": Pages(total=100, free=free),
        "slots": Pages(total=8, free=8),
        "sequence": sequence,
    }
    return WorkerReport(**(values | more))


AUTO = Demand(prompt_len=160, num_choices=1, path="auto", strict=False)


def registry() -> WorkerRegistry:
    return WorkerRegistry(LoopClock(), Counters(), worker_timeout_s=0.05)
