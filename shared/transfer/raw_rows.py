"""Rows as they are, between a socket and pages, with their digests.

A step at a time, small enough for what was digested to be in the cache still when the kernel copies it, or the other
way round: reading memory twice would cost more than the digest does. While one side digests, the socket's buffer keeps
the other busy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shared.transfer.pool import DIGEST_BYTES, Pool, Run
from shared.transfer.row_spans import Step, Steps, steps_of
from shared.transfer.vectors import Vectors

STEP_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class RawRows:
    """On one connection. apart: each layer of a piece is a step, or several, of its own."""

    fd: int
    pool: Pool
    step_bytes: int = STEP_BYTES
    apart: bool = False

    def send(self, run: Run, layers: range, before: Callable[[int], None]) -> list[np.ndarray]:
        """Sends these layers of `run` and returns the digests of each, as `Pool.digests` does. before(num_bytes):
        called before each step, may raise."""
        digests, cut, vectors = self._begin(run, layers)
        for step in cut.steps:
            before(step.num_bytes)
            self._digest(step, digests, layers)
            vectors.send(self.fd, step.spans.start, step.spans.stop)
        return list(digests)

    def receive(
        self, run: Run, layers: range, before: Callable[[], None], after: Callable[[Step], None]
    ) -> list[np.ndarray]:
        """Fills these layers of `run`; the digests are of what lies there then. after(step): before it is digested."""
        digests, cut, vectors = self._begin(run, layers)
        for step in cut.steps:
            before()
            vectors.receive(self.fd, step.spans.start, step.spans.stop)
            after(step)
            self._digest(step, digests, layers)
        return list(digests)

    def _begin(self, run: Run, layers: range) -> tuple[np.ndarray, Steps, Vectors]:
        cut = steps_of(self.pool.layout, run, layers, self.step_bytes, apart=self.apart)
        digests = np.empty((len(layers), len(run.units), DIGEST_BYTES), dtype=np.uint8)
        return digests, cut, Vectors(np.frombuffer(self.pool.bytes, dtype=np.uint8), cut.spans)

    def _digest(self, step: Step, digests: np.ndarray, layers: range) -> None:
        end = step.first_unit + len(step.run.units)
        for layer in step.layers:
            digests[layer - layers.start, step.first_unit : end] = self.pool.digests(step.run, layer)
