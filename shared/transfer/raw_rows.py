"""Rows as they are, between a socket and pages, with their digests.

A step at a time, small enough for what was digested to be in the cache still when the kernel copies it, or the other
way round: reading memory twice would cost more than the digest does. While one side digests, the socket's buffer keeps
the other busy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shared.state.components import StateComponent
from shared.transfer.pool import DIGEST_BYTES, Pool, Run
from shared.transfer.vectors import Vectors

_STEP_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Step:
    """Some layers of all units of a piece, or one layer of some of them. first_unit: its place in the piece.
    spans: which of the piece's it is."""

    run: Run
    first_unit: int
    layers: range
    spans: range


@dataclass(frozen=True, slots=True)
class Steps:
    """A piece cut up. spans: int64 [n, 2], those of the whole piece, in wire order."""

    spans: np.ndarray
    steps: tuple[Step, ...]


def steps_of(pool: Pool, run: Run, layers: range, *, apart: bool = False) -> Steps:
    """All of `run` in wire order. apart: no step has several layers."""
    component, num_units = pool.layout.components[run.component], len(run.units)
    at_once = max(1, _STEP_BYTES // component.unit_bytes)
    if num_units <= at_once:
        spans = pool.spans(run, layers)
        return Steps(spans.reshape(-1, 2), tuple(_by_layers(run, layers, spans, 1 if apart else at_once // num_units)))
    spans = pool.spans(run, layers, at_once)
    return Steps(spans.reshape(-1, 2), tuple(_by_units(run, layers, spans, at_once, component)))


def _by_layers(run: Run, layers: range, spans: np.ndarray, at_once: int) -> Iterator[Step]:
    each = spans.shape[1]
    for k in range(0, len(layers), at_once):
        some = layers[k : k + at_once]
        yield Step(run, 0, some, range(k * each, (k + len(some)) * each))


def _by_units(run: Run, layers: range, spans: np.ndarray, at_once: int, component: StateComponent) -> Iterator[Step]:
    """None of `spans` belongs to two steps. The last step has all of the last unit, whole or not."""
    each, num_bytes = spans.shape[1], np.cumsum(spans[0, :, 1])
    firsts = range(0, len(run.units), at_once)
    parts = [run.part(first, first + at_once, component.unit_tokens) for first in firsts]
    starts = np.searchsorted(num_bytes, [first * component.unit_bytes for first in firsts], side="right").tolist()
    for k in range(len(layers)):
        for first, part, start, end in zip(firsts, parts, starts, [*starts[1:], each], strict=True):
            yield Step(part, first, layers[k : k + 1], range(k * each + start, k * each + end))


@dataclass(frozen=True, slots=True)
class RawRows:
    """On one connection."""

    fd: int
    pool: Pool
    apart: bool = False

    def send(self, run: Run, layers: range, before: Callable[[Step], None]) -> list[np.ndarray]:
        """Sends all of `run` and returns the digests of each layer, as `Pool.digests` does. before(step): called before
        each, may raise."""
        digests, cut = _empty(run, layers), steps_of(self.pool, run, layers, apart=self.apart)
        vectors = Vectors(self.pool.flat, cut.spans)
        for step in cut.steps:
            before(step)
            self._digest(step, digests, layers)
            vectors.send(self.fd, step.spans.start, step.spans.stop)
        return list(digests)

    def receive(
        self, run: Run, layers: range, before: Callable[[Step], None], after: Callable[[Step], None]
    ) -> list[np.ndarray]:
        """Fills all of `run`; the digests are of what lies there then. after(step): before it is digested."""
        digests, cut = _empty(run, layers), steps_of(self.pool, run, layers, apart=self.apart)
        vectors = Vectors(self.pool.flat, cut.spans)
        for step in cut.steps:
            before(step)
            vectors.receive(self.fd, step.spans.start, step.spans.stop)
            after(step)
            self._digest(step, digests, layers)
        return list(digests)

    def _digest(self, step: Step, digests: np.ndarray, layers: range) -> None:
        end = step.first_unit + len(step.run.units)
        for layer in step.layers:
            digests[layer - layers.start, step.first_unit : end] = self.pool.digests(step.run, layer)


def _empty(run: Run, layers: range) -> np.ndarray:
    return np.empty((len(layers), len(run.units), DIGEST_BYTES), dtype=np.uint8)
