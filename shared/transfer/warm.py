"""Pages of the pool are there, and mapped, before the bytes come: the first touch of a page costs several times as much
as copying into it does."""

import logging
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shared.transfer.planes import joined
from shared.transfer.pool import Pool, units_array

_log = logging.getLogger(__name__)
_POPULATE_WRITE = 23
_AT_ONCE_BYTES = 128 * 1024
"""The interpreter is held meanwhile."""


class Warmer:
    """Has a thread of its own, which calls on_thread first of all. Writes nothing: whose pages they are by then does
    not matter."""

    def __init__(self, pool: Pool, on_thread: Callable[[], None] | None = None) -> None:
        self._pool = pool
        self._touched = [np.zeros(pool.layout.units_of(one), dtype=bool) for one in pool.layout.components]
        self._thread = ThreadPoolExecutor(1, "warm", on_thread)
        self._map = pool.bytes.obj if isinstance(pool.bytes.obj, mmap.mmap) else None

    def soon(self, tables: Sequence[Sequence[int]]) -> None:
        """Units that exist, by component. Returns at once; what has been touched once is left alone."""
        for component, table in enumerate(tables):
            units, touched = units_array(table), self._touched[component]
            fresh = np.sort(units[~touched[units]])
            touched[fresh] = True
            if len(fresh) and self._map is not None:
                self._thread.submit(self._touch, component, fresh)

    def close(self) -> None:
        """What is not begun is left out."""
        self._map = None
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _touch(self, component: int, units: np.ndarray) -> None:
        plane, page = self._pool.plane(component), mmap.PAGESIZE
        firsts, counts = joined(units)
        spans = np.stack((firsts, firsts + counts), axis=1) * plane.unit_bytes
        for layer in range(plane.num_layers):
            for start, end in (plane.base(layer) + spans).tolist():
                for at in range(start // page * page, end, _AT_ONCE_BYTES):
                    if (pages := self._map) is None:
                        return
                    self._populate(pages, at, min(_AT_ONCE_BYTES, end - at))

    def _populate(self, pages: mmap.mmap, at: int, num_bytes: int) -> None:
        try:
            pages.madvise(_POPULATE_WRITE, at, num_bytes)
        except OSError as error:  # an old kernel, or no memory: then the bytes themselves will touch the page
            _log.info("pages are not touched ahead: %s", error)
            self._map = None
