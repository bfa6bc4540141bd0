"""Rows as they are, between a socket and pages, with their digests.

Each step's rows are digested by the thread that moves them, right before they leave or after they came: then they are
in the cache, and reading them twice costs memory once. A thread beside it would take a core from the kernel's copies.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shared.transfer.coded_rows import WireCost
from shared.transfer.pool import Pool, Run, room_for_digests
from shared.transfer.row_spans import Step, Steps, steps_of
from shared.transfer.vectors import Vectors

STEP_BYTES = 2 << 20
"""Less costs more calls, more does not stay in the cache."""


@dataclass(frozen=True, slots=True)
class RawRows:
    """On one connection. apart: each layer of a piece is a step, or several, of its own."""

    fd: int
    pool: Pool
    step_bytes: int = STEP_BYTES
    apart: bool = False

    def send(self, run: Run, layers: range, before: Callable[[int], None]) -> tuple[list[np.ndarray], WireCost]:
        """Sends these layers of `run` and returns the digests of each, as `Pool.digests` does. before(num_bytes):
        called before each step, may raise. Reads no page any more when it ends, however it ends."""
        sent = WireCost()
        cut, vectors = self._begin(run, layers)
        digests = room_for_digests(run, layers)
        digester = self.pool.digester(run, layers, digests)
        for step in cut.steps:
            before(step.num_bytes)
            digester.upto(digester.whole_below(step.layers[-1], step.first_unit + len(step.run.units)))
            began = time.monotonic()
            vectors.send(self.fd, step.spans.start, step.spans.stop)
            sent += WireCost(step.num_bytes, time.monotonic() - began)
        digester.rest()
        return list(digests), sent

    def receive(
        self, run: Run, layers: range, before: Callable[[], None], after: Callable[[Step], None]
    ) -> list[np.ndarray]:
        """Fills these layers of `run`; the digests are of what lies there then. after(step): before it is digested."""
        cut, vectors = self._begin(run, layers)
        digests = room_for_digests(run, layers)
        digester = self.pool.digester(run, layers, digests)
        for step in cut.steps:
            before()
            vectors.receive(self.fd, step.spans.start, step.spans.stop)
            after(step)
            digester.upto(digester.whole_below(step.layers[-1], step.first_unit + len(step.run.units)))
        digester.rest()
        return list(digests)

    def _begin(self, run: Run, layers: range) -> tuple[Steps, Vectors]:
        cut = steps_of(self.pool.layout, run, layers, self.step_bytes, apart=self.apart)
        return cut, Vectors(np.frombuffer(self.pool.bytes, dtype=np.uint8), cut.spans)
