"""Rows as they are, between a socket and pages, with their digests.

A step at a time, small enough for what was digested to be in the cache still when the kernel copies it, or the other
way round: reading memory twice would cost more than the digest does. While one side digests, the socket's buffer keeps
the other busy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shared.transfer import vectors
from shared.transfer.pool import DIGEST_BYTES, Pool, Run

_STEP_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Step:
    """Some layers of all units of a piece, or one layer of some of them. `first_unit`: its place in the piece."""

    run: Run
    first_unit: int
    first_layer: int
    num_layers: int


def steps(pool: Pool, run: Run, layers: range, *, apart: bool = False) -> Iterator[Step]:
    """All of `run` in wire order. apart: no step has several layers."""
    component, num_units = pool.layout.components[run.component], len(run.units)
    units_at_once = max(1, _STEP_BYTES // component.unit_bytes)
    if num_units <= units_at_once:
        layers_at_once = 1 if apart else units_at_once // num_units
        for first in range(layers.start, layers.stop, layers_at_once):
            yield Step(run, 0, first, min(layers_at_once, layers.stop - first))
        return
    parts = [(at, run.part(at, at + units_at_once, component.unit_tokens)) for at in range(0, num_units, units_at_once)]
    for layer in layers:
        for at, part in parts:
            yield Step(part, at, layer, 1)


@dataclass(frozen=True, slots=True)
class RawRows:
    """On one connection. before(step): called before each, may raise."""

    fd: int
    pool: Pool
    apart: bool = False

    def send(self, run: Run, layers: range, before: Callable[[Step], None]) -> list[np.ndarray]:
        """Sends all of `run` and returns the digests of each layer, as `Pool.digests` does."""
        digests, flat = _empty(run, layers), np.frombuffer(self.pool.bytes, dtype=np.uint8)
        for step in steps(self.pool, run, layers, apart=self.apart):
            before(step)
            self._digest(step, digests, layers)
            vectors.send(self.fd, flat, self.pool.spans(step.run, step.first_layer, step.num_layers))
        return list(digests)

    def receive(
        self, run: Run, layers: range, before: Callable[[Step], None], after: Callable[[Step], None]
    ) -> list[np.ndarray]:
        """Fills all of `run`; the digests are of what lies there then. after(step): before it is digested."""
        digests, flat = _empty(run, layers), np.frombuffer(self.pool.bytes, dtype=np.uint8)
        for step in steps(self.pool, run, layers, apart=self.apart):
            before(step)
            vectors.receive(self.fd, flat, self.pool.spans(step.run, step.first_layer, step.num_layers))
            after(step)
            self._digest(step, digests, layers)
        return list(digests)

    def _digest(self, step: Step, digests: np.ndarray, layers: range) -> None:
        end = step.first_unit + len(step.run.units)
        for layer in range(step.first_layer, step.first_layer + step.num_layers):
            digests[layer - layers.start, step.first_unit : end] = self.pool.digests(step.run, layer)


def _empty(run: Run, layers: range) -> np.ndarray:
    return np.empty((len(layers), len(run.units), DIGEST_BYTES), dtype=np.uint8)
