"""A worker's pool as its bytes: where the rows of a run of units lie, and how they are copied and digested.

Copies and digests are done in bursts by whoever asks for the next one, so that a transfer can be stopped, or let
another one go first, within a millisecond or so. It knows no tickets and no sockets.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import xxhash

from shared.runtime.errors import TransferRefused
from shared.state.layout import PoolLayout
from shared.transfer.digester import DIGEST_BYTES, Digester, digests_of_rows, entry, flat_digests, put_back, units_of
from shared.transfer.kernels import Kernels
from shared.transfer.planes import Plane, joined_pairs

BURST_BYTES = 8 * 1024 * 1024
"""Well under a millisecond of copying on a good machine, a few on a bad one."""
_FEW = 4
"""So many units are done before a kernel has been told about them."""
_COPY_RUN_BYTES = 128 * 1024
"""Longest copy before it is hashed: what was written should still be in the cache."""


def units_array(units: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64, whatever they came as; a number that is beyond that becomes one that no pool has."""
    try:
        return np.asarray(units, dtype=np.int64)
    except OverflowError:
        return np.full(len(units), -1, dtype=np.int64)


class Run:
    """Physical units of one component in `layers`; of the last unit only the first `rows_in_last` rows."""

    __slots__ = ("component", "layers", "rows_in_last", "units")

    def __init__(
        self, component: int, units: Sequence[int] | np.ndarray, rows_in_last: int, layers: range = range(0)
    ) -> None:
        self.component, self.units, self.rows_in_last = component, units_array(units), rows_in_last
        self.layers = layers

    def __repr__(self) -> str:
        return f"Run({self.component}, {self.units.tolist()}, {self.rows_in_last}, {self.layers})"


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
        self._planes = tuple(Plane.of(layout, index) for index in range(len(layout.components)))

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

    def plane(self, component: int) -> Plane:
        return self._planes[component]

    def num_layers(self, component: int) -> int:
        return self._planes[component].num_layers

    def holds(self, run: Run) -> bool:
        """Whether every unit, row and layer of `run` exists in this pool."""
        known = 0 <= run.component < len(self._planes)
        return known and self._planes[run.component].holds(run.units, run.rows_in_last, run.layers)

    def digests(self, run: Run, layer: int) -> np.ndarray:
        """xxh3-128 of each unit's rows with state in one layer, in order: [units, 16] bytes."""
        layers = range(layer, layer + 1)
        found = room_for_digests(run, layers)
        for _ in self.digesting(run, layers, found):
            pass
        return found[0]  # type: ignore[no-any-return]

    def digesting(self, run: Run, layers: range, found: np.ndarray, burst_bytes: int = BURST_BYTES) -> Iterator[int]:
        """Enters the digests of `run` in these layers into `found`. A part of the work is done with each step, which
        says how many bytes that was: who asks for the next one decides when it goes on, and whether."""
        unit_bytes = self._planes[run.component].unit_bytes
        digester = self.digester(run, layers, found)
        each = max(1, -(-burst_bytes // unit_bytes))
        while (before := digester.done) < digester.total:
            digester.upto(min(digester.total, before + each))
            yield (digester.done - before) * unit_bytes
        if num_bytes := digester.rest():
            yield num_bytes

    def digester(self, run: Run, layers: range, found: np.ndarray) -> Digester:
        """What makes the digests of `run` in these layers as it is told to."""
        plane = self._planes[run.component]
        return Digester(self._flat, plane, run.units, run.rows_in_last, layers, found, self.kernels)

    def copying(
        self,
        source: "Pool",
        theirs: Run,
        mine: Run,
        layers: range,
        found: np.ndarray | None,
        burst_bytes: int = BURST_BYTES,
    ) -> Iterator[int]:
        """Copies these layers of their units into mine, equally many and of equal shape, and enters the digests of what
        was written into `found`. A part of the work is done with each step, as in `digesting`. Without `found` none are
        made."""
        ours, other = self._planes[mine.component], source._planes[theirs.component]
        whole, size = _num_whole(ours, mine), ours.unit_bytes
        kernels = self.kernels if whole * len(layers) > _FEW else None
        if kernels is not None and (found is None or kernels.can_digest(size)):
            into = units_of(kernels, self._flat, mine.units[:whole], ours, layers)
            out_of = units_of(kernels, source._flat, theirs.units[:whole], other, layers)
            at, flat = 0, None if found is None else flat_digests(found, whole)
            while at < into.total:
                before = at
                if flat is None:
                    at = kernels.copy_units(into, out_of, at, burst_bytes)
                else:
                    at = kernels.copy_and_digest_units(into, out_of, flat, at, burst_bytes)
                yield (at - before) * size
            if found is not None and flat is not None:
                put_back(found, flat, whole)
        else:
            for number, layer in enumerate(layers):
                into_found = None if found is None else found[number]
                pair = theirs.units[:whole], mine.units[:whole]
                yield from self._copy_plainly(source, pair, (other, ours), layer, into_found, burst_bytes)
        if whole < len(mine.units):
            rows = ours.first_rows(self._flat, layers, int(mine.units[-1]), mine.rows_in_last)
            rows[:] = other.first_rows(source._flat, layers, int(theirs.units[-1]), mine.rows_in_last)
            if found is not None:
                found[:, whole] = digests_of_rows(rows)
            yield rows.nbytes

    def flip_byte(self, run: Run, layer: int) -> None:
        """Spoils the first byte of `run`: what a fault injection does."""
        plane = self._planes[run.component]
        self._flat[plane.base(layer) + int(run.units[0]) * plane.unit_bytes] ^= 0xFF

    def _copy_plainly(
        self,
        source: "Pool",
        units: tuple[np.ndarray, np.ndarray],
        planes: tuple[Plane, Plane],
        layer: int,
        found: np.ndarray | None,
        burst_bytes: int,
    ) -> Iterator[int]:
        start, to = (plane.base(layer) for plane in planes)
        size, flat, data, digest = planes[1].unit_bytes, self._flat, self.bytes, xxhash.xxh3_128_digest
        done, waiting, limit = 0, 0, max(1, min(_COPY_RUN_BYTES, burst_bytes) // size)
        for src, dst, count in joined_pairs(*units, limit):
            a, b = to + dst * size, start + src * size
            flat[a : a + count * size] = source._flat[b : b + count * size]
            for at in range(a, a + count * size, size) if found is not None else ():
                found[done] = entry(digest(data[at : at + size]))  # type: ignore[index]
                done += 1
            waiting += count * size
            if waiting >= burst_bytes:
                yield waiting
                waiting = 0
        yield waiting


def room_for_digests(run: Run, layers: range) -> np.ndarray:
    """[layers, units, 16] bytes."""
    return np.zeros((len(layers), len(run.units), DIGEST_BYTES), dtype=np.uint8)


def _num_whole(plane: Plane, run: Run) -> int:
    """Units of which every row carries state."""
    return len(run.units) - (run.rows_in_last < plane.unit_tokens)
