"""What every flow is given instead of reaching for it: the bus, the clock, a place to start tasks, and its own name."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.bus.base import Bus
from shared.runtime.clock import Clock
from shared.runtime.counters import Counters


class Spawn(Protocol):
    """Starts a task that belongs to the service: it is logged if it fails and ended with the service."""

    def __call__(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...


@dataclass(frozen=True, slots=True)
class Deps:
    """peer: how this process is addressed on the bus. spawn_vital: for what the process cannot live without: if it
    fails the process ends. changed: publish a fresh report soon."""

    peer: str
    bus: Bus
    clock: Clock
    spawn: Spawn
    spawn_vital: Spawn
    changed: Callable[[], None]
    counters: Counters = field(default_factory=Counters)
