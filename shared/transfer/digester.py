"""Digests of a run made little by little by whoever moves its bytes, so that these are still in the cache."""

from typing import Any

import numpy as np
import xxhash

from shared.transfer.kernels import Kernels
from shared.transfer.planes import Plane

DIGEST_BYTES = 16
_FEW = 4
"""So many units are done before a kernel has been told about them."""


class Digester:
    """xxh3-128 of the rows with state, entered into `found`, [layers, units, 16] bytes. Whole units are numbered layer
    after layer; `total` of them are made by `upto`, in that order. What a unit that is not whole has is left for
    `rest`."""

    def __init__(
        self,
        flat: np.ndarray,
        plane: Plane,
        units: np.ndarray,
        rows_in_last: int,
        layers: range,
        found: np.ndarray,
        kernels: Kernels | None,
    ) -> None:
        self._flat, self._plane, self._units, self._layers, self._found = flat, plane, units, layers, found
        self._data, self._rows_in_last = flat.data, rows_in_last
        self._whole = len(units) - (rows_in_last < plane.unit_tokens)
        self.total, self.done = self._whole * len(layers), 0
        self._kernels = kernels if self.total > _FEW and kernels and kernels.can_digest(plane.unit_bytes) else None
        self._digests = flat_digests(found, self._whole)
        self._job: Any = None

    def upto(self, number: int) -> None:
        """Makes those of the whole units below `number` that are not made yet."""
        if number <= self.done:
            return
        if self._kernels is not None:
            if self._job is None:
                self._job = units_of(self._kernels, self._flat, self._units[: self._whole], self._plane, self._layers)
            limit = (number - self.done) * self._plane.unit_bytes
            self.done = self._kernels.digest_units(self._job, self._digests, self.done, limit)
        else:
            self._plainly(number)

    def whole_below(self, layer: int, unit: int) -> int:
        """How many whole units lie before that one of that layer."""
        return (layer - self._layers.start) * self._whole + min(unit, self._whole)

    def rest(self) -> int:
        """Ends it; returns the bytes of the rows in units that are not whole."""
        self.upto(self.total)
        put_back(self._found, self._digests, self._whole)
        if self._whole == len(self._units):
            return 0
        rows = self._plane.first_rows(self._flat, self._layers, int(self._units[-1]), self._rows_in_last)
        self._found[:, self._whole] = digests_of_rows(rows)
        return rows.nbytes

    def _plainly(self, number: int) -> None:
        size, digest, plane = self._plane.unit_bytes, xxhash.xxh3_128_digest, self._plane
        for k in range(self.done, number):
            layer, unit = divmod(k, self._whole)
            start = plane.base(self._layers.start + layer) + int(self._units[unit]) * size
            self._digests[k] = entry(digest(self._data[start : start + size]))
        self.done = number


def units_of(kernels: Kernels, flat: np.ndarray, units: np.ndarray, plane: Plane, layers: range) -> Any:
    """As the kernels take them."""
    units, offset = np.ascontiguousarray(units), plane.base(layers.start)
    return kernels.Units(flat, units, plane.unit_bytes, offset, plane.layer_bytes, len(layers))


def flat_digests(found: np.ndarray, whole: int) -> np.ndarray:
    """What is filled for the first `whole` units: a row for each unit and layer."""
    if whole == found.shape[1]:
        return found.reshape(-1, DIGEST_BYTES)
    return np.empty((found.shape[0] * whole, DIGEST_BYTES), dtype=np.uint8)


def put_back(found: np.ndarray, flat: np.ndarray, whole: int) -> None:
    if 0 < whole < found.shape[1]:
        found[:, :whole] = flat.reshape(-1, whole, DIGEST_BYTES)


def digests_of_rows(rows: np.ndarray) -> np.ndarray:
    """Of each layer's in `Plane.first_rows`: [layers, 16]."""
    return np.stack([entry(xxhash.xxh3_128_digest(np.ascontiguousarray(layer).data)) for layer in rows])


def entry(digest: bytes) -> np.ndarray:
    return np.frombuffer(digest, dtype=np.uint8)
