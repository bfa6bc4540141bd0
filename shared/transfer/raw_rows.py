"""Rows as they are, between a socket and pages, with their digests.

Two ends of a fast link wait for each other about half of the time. In that time a thread beside the one that moves the
bytes digests them: the sender's while they leave, the receiver's a step behind.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from shared.transfer.pool import DIGEST_BYTES, Pool, Run
from shared.transfer.row_spans import Step, Steps, steps_of
from shared.transfer.vectors import Vectors

STEP_BYTES = 8 << 20
"""Each step costs the peer a wakening; the last one is digested when all has come."""


@dataclass(frozen=True, slots=True)
class RawRows:
    """On one connection. apart: each layer of a piece is a step, or several, of its own."""

    fd: int
    pool: Pool
    step_bytes: int = STEP_BYTES
    apart: bool = False

    def send(self, run: Run, layers: range, before: Callable[[int], None]) -> list[np.ndarray]:
        """Sends these layers of `run` and returns the digests of each, as `Pool.digests` does. before(num_bytes):
        called before each step, may raise. Reads no page any more when it ends, however it ends."""
        cut, vectors = self._begin(run, layers)
        digests = _empty(run, layers)
        with self._digesting(cut, digests, layers) as digest:
            for step in cut.steps:
                before(step.num_bytes)
                digest(step)
                vectors.send(self.fd, step.spans.start, step.spans.stop)
        return list(digests)

    def receive(
        self, run: Run, layers: range, before: Callable[[], None], after: Callable[[Step], None]
    ) -> list[np.ndarray]:
        """Fills these layers of `run`; the digests are of what lies there then. after(step): before it is digested."""
        cut, vectors = self._begin(run, layers)
        digests = _empty(run, layers)
        with self._digesting(cut, digests, layers) as digest:
            for step in cut.steps:
                before()
                vectors.receive(self.fd, step.spans.start, step.spans.stop)
                after(step)
                digest(step)
        return list(digests)

    def _begin(self, run: Run, layers: range) -> tuple[Steps, Vectors]:
        cut = steps_of(self.pool.layout, run, layers, self.step_bytes, apart=self.apart)
        return cut, Vectors(np.frombuffer(self.pool.bytes, dtype=np.uint8), cut.spans)

    @contextmanager
    def _digesting(self, cut: Steps, digests: np.ndarray, layers: range) -> Iterator[Callable[[Step], None]]:
        """What digests a step; all are done, or given up after an error, when this ends."""

        def digest(step: Step) -> None:
            end = step.first_unit + len(step.run.units)
            for layer in step.layers:
                digests[layer - layers.start, step.first_unit : end] = self.pool.digests(step.run, layer)

        if len(cut.steps) == 1:  # a thread would cost more than it hides
            yield digest
            return
        beside = ThreadPoolExecutor(1, thread_name_prefix="digest")
        try:
            digested: list[Future[None]] = []
            yield lambda step: digested.append(beside.submit(digest, step))
            for one in digested:
                one.result()
        finally:
            beside.shutdown(cancel_futures=True)


def _empty(run: Run, layers: range) -> np.ndarray:
    return np.empty((len(layers), len(run.units), DIGEST_BYTES), dtype=np.uint8)
