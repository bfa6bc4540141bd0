"""A worker's pool as its bytes: where the rows of a run of units lie, and how they are copied and digested.

Everything here works layer by layer on plain offsets, so that a transfer costs a few microseconds of Python a page and
can be stopped between two layers. It knows no tickets and no sockets.
"""

import fcntl
import functools
import math
import mmap
import os
from dataclasses import dataclass
from typing import Self

import numpy as np
import xxhash

from shared.runtime.errors import TransferRefused
from shared.state.layout import PoolLayout
from shared.transfer.kernels import Kernels

DIGEST_BYTES = 16
_COPY_RUN_BYTES = 128 * 1024
"""Longest copy before it is hashed: what was written should still be in the cache."""


@dataclass(frozen=True)
class Run:
    """Physical units of one component, all its layers; of the last unit only the first `rows_in_last` rows."""

    component: int
    units: tuple[int, ...]
    rows_in_last: int

    @functools.cached_property
    def index(self) -> np.ndarray:
        return np.array(self.units, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Plane:
    """One component in bytes. A unit is `segments` pieces of unit_tokens rows each, `row_bytes` a row and segment."""

    offset: int
    layer_bytes: int
    num_layers: int
    num_units: int
    unit_bytes: int
    unit_tokens: int
    segments: int
    row_bytes: int


def create_pool(layout: PoolLayout) -> int:
    """A new memfd of the layout's size that can neither shrink nor grow, so that no reader of it can be made to
    fault. The caller owns the descriptor."""
    fd = os.memfd_create("baton-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, max(layout.total_bytes, mmap.PAGESIZE))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


class Pool:
    """A mapped pool. Unmapped when the last view of it is gone. kernels: used as soon as they are set."""

    def __init__(self, layout: PoolLayout, buffer: memoryview) -> None:
        self.layout = layout
        self.bytes = buffer
        self.kernels: Kernels | None = None
        self._flat = np.frombuffer(buffer, dtype=np.uint8)
        self._planes = tuple(_plane(layout, index) for index in range(len(layout.components)))

    @classmethod
    def map(cls, fd: int, layout: PoolLayout, *, writable: bool) -> Self:
        """Maps the whole pool; the descriptor stays the caller's. Raises TransferRefused if the file is smaller than
        the layout or could shrink while it is read."""
        if layout.num_pages < 0 or layout.num_slots < 0 or os.fstat(fd).st_size < layout.total_bytes:
            raise TransferRefused("geometry: the pool is smaller than its layout")
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed:
            raise TransferRefused("geometry: the pool is not sealed against shrinking")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        size = max(layout.total_bytes, mmap.PAGESIZE)
        return cls(layout, memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, access)))

    def num_layers(self, component: int) -> int:
        return self._planes[component].num_layers

    def holds(self, run: Run) -> bool:
        """Whether every unit and row of `run` exists in this pool."""
        if not 0 <= run.component < len(self._planes) or not run.units:
            return False
        plane = self._planes[run.component]
        return min(run.units) >= 0 and max(run.units) < plane.num_units and 1 <= run.rows_in_last <= plane.unit_tokens

    def views(self, run: Run, layer: int) -> list[memoryview]:
        """The rows of `run` in one layer, in wire order: unit after unit, neighbours joined."""
        plane = self._planes[run.component]
        base = plane.offset + layer * plane.layer_bytes
        whole = run.units if run.rows_in_last == plane.unit_tokens else run.units[:-1]
        views = []
        for first, count in _runs(whole):
            start = base + first * plane.unit_bytes
            views.append(self.bytes[start : start + count * plane.unit_bytes])
        if len(whole) < len(run.units):
            views.extend(self.bytes[start:end] for start, end in _partial(plane, base, run))
        return views

    def digests(self, run: Run, layer: int) -> np.ndarray:
        """xxh3-128 of each unit's rows with state in one layer, in order: [units, 16] bytes."""
        plane = self._planes[run.component]
        base = plane.offset + layer * plane.layer_bytes
        size, data, digest, kernels = plane.unit_bytes, self.bytes, xxhash.xxh3_128_digest, self.kernels
        whole = len(run.units) - (run.rows_in_last < plane.unit_tokens)
        found = np.empty((len(run.units), DIGEST_BYTES), dtype=np.uint8)
        if kernels is not None and kernels.can_digest(size):
            kernels.digest_units(kernels.Units(self._flat, run.index[:whole], size, base), found[:whole])
        else:
            for k, unit in enumerate(run.units[:whole]):
                start = base + unit * size
                found[k] = _entry(digest(data[start : start + size]))
        if whole < len(run.units):
            hasher = xxhash.xxh3_128()
            for start, end in _partial(plane, base, run):
                hasher.update(data[start:end])
            found[whole] = _entry(hasher.digest())
        return found

    def copy_from(self, source: "Pool", theirs: Run, mine: Run, layer: int) -> np.ndarray:
        """Copies one layer of their units into mine (equally many, of equal shape) and returns the digests of what was
        written into mine, as `digests` does."""
        ours, other = self._planes[mine.component], source._planes[theirs.component]
        to = ours.offset + layer * ours.layer_bytes
        start = other.offset + layer * other.layer_bytes
        size, flat, data, kernels = ours.unit_bytes, self._flat, self.bytes, self.kernels
        whole = len(mine.units) - (mine.rows_in_last < ours.unit_tokens)
        found = np.empty((len(mine.units), DIGEST_BYTES), dtype=np.uint8)
        if kernels is not None and kernels.can_digest(size):
            into = kernels.Units(flat, mine.index[:whole], size, to)
            kernels.copy_and_digest_units(
                into, kernels.Units(source._flat, theirs.index[:whole], size, start), found[:whole]
            )
        else:
            done, digest, limit = 0, xxhash.xxh3_128_digest, max(1, _COPY_RUN_BYTES // size)
            for src, dst, count in _paired_runs(theirs.units[:whole], mine.units[:whole], limit):
                a, b = to + dst * size, start + src * size
                flat[a : a + count * size] = source._flat[b : b + count * size]
                for at in range(a, a + count * size, size):
                    found[done] = _entry(digest(data[at : at + size]))
                    done += 1
        if whole < len(mine.units):
            hasher = xxhash.xxh3_128()
            for (a, a_end), (b, b_end) in zip(_partial(ours, to, mine), _partial(other, start, theirs), strict=True):
                flat[a:a_end] = source._flat[b:b_end]
                hasher.update(data[a:a_end])
            found[whole] = _entry(hasher.digest())
        return found

    def flip_byte(self, run: Run, layer: int) -> None:
        """Spoils the first byte of `run`: what a fault injection does."""
        view = self.views(run, layer)[0]
        view[0] ^= 0xFF


def _entry(digest: bytes) -> np.ndarray:
    return np.frombuffer(digest, dtype=np.uint8)


def _plane(layout: PoolLayout, index: int) -> _Plane:
    component = layout.components[index]
    segments = math.prod(component.outer)
    num_units = layout.units_of(component)
    return _Plane(
        offset=layout.offset_of(index),
        layer_bytes=component.unit_bytes * num_units,
        num_layers=component.num_layers,
        num_units=num_units,
        unit_bytes=component.unit_bytes,
        unit_tokens=component.unit_tokens,
        segments=segments,
        row_bytes=component.row_bytes // segments if segments else 0,
    )


def _partial(plane: _Plane, base: int, run: Run) -> list[tuple[int, int]]:
    """Byte ranges of the rows with state in the last unit, one for each segment."""
    start = base + run.units[-1] * plane.unit_bytes
    step, size = plane.unit_tokens * plane.row_bytes, run.rows_in_last * plane.row_bytes
    return [(start + k * step, start + k * step + size) for k in range(plane.segments)]


def _runs(units: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first, count) of neighbouring units."""
    found: list[tuple[int, int]] = []
    for unit in units:
        if found and sum(found[-1]) == unit:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((unit, 1))
    return found


def _paired_runs(src: tuple[int, ...], dst: tuple[int, ...], limit: int) -> list[tuple[int, int, int]]:
    """(source, destination, count) of units that are neighbours on both sides, `limit` units at most."""
    found: list[tuple[int, int, int]] = []
    for a, b in zip(src, dst, strict=True):
        if found:
            x, y, n = found[-1]
            if a == x + n and b == y + n and n < limit:
                found[-1] = (x, y, n + 1)
                continue
        found.append((a, b, 1))
    return found
