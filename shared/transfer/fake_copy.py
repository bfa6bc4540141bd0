"""How the fake link copies: a layer of a piece at a time, between pools that are cut alike or not."""

from collections.abc import Sequence

import numpy as np

from shared.transfer.grant import Grant
from shared.transfer.pool import Pool, Run
from shared.transfer.regroup import Staging


class LayerCopy:
    """One transfer that was let in. runs: where its pieces lie in the sender's pool."""

    def __init__(self, source: Pool, target: Pool, grant: Grant, runs: Sequence[Run]) -> None:
        self._source, self._target, self._grant, self._runs = source, target, grant, runs
        self._staging = None if grant.fit is None else Staging(grant.fit, grant.pieces, target, grant.held_len)

    def copy(self, number: int, layer: int, *, spoil: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """(digests of what was written, digests of the source). spoil: the first byte is not what it was."""
        theirs, mine, only = self._runs[number], self._grant.runs[number], range(layer, layer + 1)
        if self._staging is None:
            for _ in self._target.copying(self._source, theirs, mine, only, None):
                pass
            if spoil:
                self._target.flip_byte(mine, layer)
            return self._target.digests(mine, layer), self._source.digests(theirs, layer)
        self._staging.gather(number, self._source, theirs.units, only)
        between, there = self._staging.pool, self._staging.runs[number]
        digests = between.digests(there, layer)
        if spoil:
            between.flip_byte(there, layer)
        self._staging.scatter(number, self._target, mine, only)
        return between.digests(there, layer), digests
