"""State on its way between two pools that cut it differently: in between it lies in a pool of its own, cut as the
sender's and with room for nothing but what is moved.

So only who must converts: a receiver with other pages lets the bytes land there as ever, digests included, and then
puts the rows where they belong; a sender of which only some heads go this way gathers those there and sends them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from shared.runtime.errors import TransferError
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout
from shared.state.remap import Fit, Place, copy_spans
from shared.state.remap.spans import Int64s, Units
from shared.transfer.backend import Digests, Faults
from shared.transfer.grant import Grant, Refused
from shared.transfer.listener import Mover
from shared.transfer.pool import Pool, Run
from shared.transfer.wire import Header, WirePiece

_BURST_BYTES = 4 << 20
"""Copied between two looks at whether to stop."""


class Staging:
    """A pool for `pieces`, which are in the sender's units. runs: where each of them lies in it. held_len: the rows of
    so many positions stay here: the receiver has them already."""

    def __init__(self, fit: Fit, pieces: Sequence[WirePiece], kernels_of: Pool, held_len: int = 0) -> None:
        self._fit, self._pieces, self._held_len = fit, pieces, held_len
        taken, places, runs = [0] * len(fit.components), dict[tuple[int, int, int], int](), []
        for piece in pieces:
            first = places.setdefault((piece.component, piece.first_unit, piece.num_units), taken[piece.component])
            taken[piece.component] = max(taken[piece.component], first + piece.num_units)  # layers share their units
            units = tuple(range(first, first + piece.num_units))
            runs.append(Run(piece.component, units, piece.rows_in_last, piece.layers))
        self.runs = tuple(runs)
        by_kind: dict[bool, list[int]] = {True: [], False: []}
        for one, count in zip(fit.components, taken, strict=True):
            by_kind[one.index is IndexKind.PAGE].append(count)
        num_pages, num_slots = (max(by_kind[paged], default=0) for paged in (True, False))
        layout = PoolLayout(fit.components, num_pages, num_slots)
        # Memory that no piece has a layer in is never touched, so it is never there.
        self.pool = Pool(layout, np.empty(max(1, layout.total_bytes), dtype=np.uint8).data)
        self.pool.kernels = kernels_of.kernels

    def gather(self, number: int, source: Pool, units: Units, layers: range) -> None:
        """Fills `layers` of a piece out of the sender's pool, where it lies in `units`."""
        copy_spans(_flat(source), _flat(self.pool), self.gather_spans(number, units, layers))

    def gather_spans(self, number: int, units: Units, layers: range) -> Int64s:
        """[n, 3] (offset at the sender's, offset here, length)."""
        piece = self._pieces[number]
        return self._fit.gather(piece.component, _run(piece), layers, units, self._place(number))

    def scatter_spans(self, number: int, units: Units, layers: range) -> Int64s:
        """[n, 3] (offset here, offset at the receiver's, length), where the piece's rows lie in its `units`."""
        piece = self._pieces[number]
        return self._fit.scatter(piece.component, _run(piece), layers, self._place(number), units, self._held_len)

    def scatter(
        self, number: int, target: Pool, mine: Run, layers: range, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Puts `layers` of a piece where they belong in the receiver's pool. Ends early once it is stopped."""
        spans = self.scatter_spans(number, mine.units, layers)
        ends = np.searchsorted(np.cumsum(spans[:, 2]), np.arange(0, int(spans[:, 2].sum()), _BURST_BYTES)[1:])
        for some in np.split(spans, ends):
            if is_stopped():
                return
            copy_spans(_flat(self.pool), _flat(target), some)

    def digests(self) -> Digests:
        return [[self.pool.digests(run, layer) for layer in run.layers] for run in self.runs]

    def _place(self, number: int) -> Place:
        units = self.runs[number].units
        return Place(self.pool.layout, units, self._pieces[number].first_unit, int(units[0]))


class Direct(Mover, Protocol):
    """A mover that lands bytes in any pool that is cut as the sender's."""

    def land_in(self, pool: Pool, grant: Grant) -> Digests:
        """`land`, with the runs of the grant in that pool."""


class RegroupingMover:
    """Receives into a staging pool by whatever way `direct` lands bytes in a pool, and from there into ours."""

    def __init__(self, fit: Fit, pool: Pool, direct: Direct) -> None:
        self.fit: Fit | None = fit
        self._fit, self._pool, self._direct = fit, pool, direct

    def check(self, header: Header) -> None:
        self._direct.check(header)

    def stop(self) -> None:
        self._direct.stop()

    def land(self, grant: Grant) -> Digests:
        staging = Staging(self._fit, grant.pieces, self._pool, grant.held_len)
        digests = self._direct.land_in(staging.pool, replace(grant, runs=staging.runs))
        for number, run in enumerate(grant.runs):
            staging.scatter(number, self._pool, run, run.layers, grant.stopped.is_set)
        return digests


class GatheringMover(RegroupingMover):
    """Takes only those heads out of the sender's mapped pool that go this way."""

    def __init__(self, fit: Fit, pool: Pool, direct: Direct, source: Pool, faults: Faults) -> None:
        super().__init__(fit, pool, direct)
        self._source, self._faults = source, faults

    def check(self, header: Header) -> None:
        super().check(header)
        if header.num_bursts:
            raise Refused("bad_bursts", "where heads are cut all is gathered at once")

    def land(self, grant: Grant) -> Digests:
        staging = Staging(self._fit, grant.pieces, self._pool, grant.held_len)
        for number, piece in enumerate(grant.pieces):
            for layer in piece.layers:
                if grant.stopped.wait(self._faults.delay_s) if self._faults.delay_s else grant.stopped.is_set():
                    return []
                staging.gather(number, self._source, piece.units, range(layer, layer + 1))
            if self._faults.corrupt and 0 in piece.layers:
                staging.pool.flip_byte(staging.runs[number], 0)
        digests = staging.digests()
        for number, run in enumerate(grant.runs):
            staging.scatter(number, self._pool, run, run.layers, grant.stopped.is_set)
        return digests


def source_of(
    fit: Fit | None, pool: Pool, runs: Sequence[Run], wire: Sequence[WirePiece], is_aborted: Callable[[], bool]
) -> tuple[Pool, Sequence[Run]]:
    """Where the sender reads the pieces `wire`, which are `runs` in its pool: there, unless only some heads go.
    TransferError if it is aborted meanwhile."""
    if fit is None or not fit.cuts_heads:
        return pool, runs
    staging = Staging(fit, wire, pool)
    for number, run in enumerate(runs):
        for layer in run.layers:
            if is_aborted():
                raise TransferError("aborted")
            staging.gather(number, pool, run.units, range(layer, layer + 1))
    return staging.pool, staging.runs


def _run(piece: WirePiece) -> tuple[int, int, int]:
    return piece.first_unit, piece.num_units, piece.rows_in_last


def _flat(pool: Pool) -> np.ndarray:
    return np.frombuffer(pool.bytes, dtype=np.uint8)
