"""The memory a worker's model state lives in: one memfd, mapped once, that the worker's sidecar maps too. Moving state
therefore costs the engine process nothing.
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

from shared.state.components import IndexKind
from shared.state.layout import PoolLayout

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class StatePool:
    """Owns the descriptor and the mapping. `tensors[i]` is component i, [layers, units, *unit_shape], sharing memory
    with `buffer`; pages are handed out as they are, slots must be cleared when taken (`clear_slot`).

    Where the state is on a device, `tensors` are not `buffer`'s own (staged_pool.py). The size is sealed, so that a
    process that maps it cannot be hit by a truncation.
    """

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout
        size = max(layout.total_bytes, mmap.PAGESIZE)
        self.fd = os.memfd_create("baton-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.buffer = memoryview(self._map)
        self.tensors: tuple[torch.Tensor, ...] = tuple(
            torch.from_numpy(layout.view(self.buffer, index)) for index in range(len(layout.components))
        )
        self._paged = tuple(c.index is IndexKind.PAGE for c in layout.components)
        self._closed = False

    def clear_slot(self, slot: int) -> None:
        """Zeroes a slot's request-indexed state: models read rows they have not written yet."""
        for tensor, paged in zip(self.tensors, self._paged, strict=True):
            if not paged:
                tensor[:, slot] = 0

    def copy_page(self, source: int, target: int) -> None:
        for tensor, paged in zip(self.tensors, self._paged, strict=True):
            if paged:
                tensor[:, target] = tensor[:, source]

    def copy_slot(self, source: int, target: int) -> None:
        for tensor, paged in zip(self.tensors, self._paged, strict=True):
            if not paged:
                tensor[:, target] = tensor[:, source]

    def bring_in(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Makes what a link has put into these units visible to steps; here it is at once."""

    def bring_out(self, pages: Sequence[int], slots: Sequence[int], layers: range | None = None) -> None:
        """Makes what steps have written to these units in these layers of the model (None: all) visible to links; here
        it is at once. Waits for it."""

    def read_units(self, pages: Sequence[int], slots: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Copies in host memory, one a component: [layers, units, *unit_shape]."""
        return tuple(
            tensor[:, list(pages if paged else slots)].cpu()
            for tensor, paged in zip(self.tensors, self._paged, strict=True)
        )

    def write_units(
        self,
        saved: Sequence[torch.Tensor],
        pages: Sequence[tuple[int, int]],
        slots: Sequence[tuple[int, int]],
    ) -> None:
        """pages, slots: (number among the saved units, unit of the pool)."""
        for tensor, source, paged in zip(self.tensors, saved, self._paged, strict=True):
            pairs = pages if paged else slots
            if pairs:
                numbers, units = [number for number, _ in pairs], [unit for _, unit in pairs]
                tensor[:, units] = source[:, numbers].to(tensor.device)

    def close(self) -> None:
        """Idempotent. No step may be running."""
        if self._closed:
            return
        self._closed = True
        self.tensors = ()
        os.close(self.fd)
        # A tensor somebody still holds keeps the mapping; it then goes with that tensor.
        with contextlib.suppress(BufferError):
            self.buffer.release()
            self._map.close()
