"""A pool whose state lives on a device, and comes and goes through the memfd, because links move host memory only.

What a prompt's chunk wrote is copied out before the chunk is told; what a link has brought is copied in by the first
step of its group. Everything else stays on the device. Host memory is taken only by pages that came or went, and by
what the copies go through (staging.py).
"""

from collections.abc import Sequence

import torch

from kernels.ops import Ops, get_ops
from shared.engine.pieces import stored_layers
from shared.engine.pool import StatePool
from shared.engine.staging import Move, Staging, as_bytes
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout


class StagedPool(StatePool):
    """`tensors` are on the device; `buffer` and the descriptor are the host's side, of the same layout. ops: those of
    the device, if not the usual ones."""

    def __init__(self, layout: PoolLayout, device: torch.device, ops: Ops | None = None) -> None:
        super().__init__(layout)
        here = self.tensors
        self._sides: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        try:
            self.tensors = tuple(torch.zeros(host.shape, dtype=host.dtype, device=device) for host in here)
            self._sides = tuple((as_bytes(t), as_bytes(h)) for t, h in zip(self.tensors, here, strict=True))
            largest = max(component.unit_bytes for component in layout.components)
            self._staging = Staging(device, ops or get_ops(device.type), largest)
        except BaseException:
            self.close()
            raise

    def bring_in(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        self._staging.bring_in(self._moves(pages, slots))

    def bring_out(self, pages: Sequence[int], slots: Sequence[int], layers: range | None = None) -> None:
        self._staging.bring_out(self._moves(pages, slots, layers))

    def _moves(self, pages: Sequence[int], slots: Sequence[int], layers: range | None = None) -> list[Move]:
        """For each component that has some, in runs of its layers."""
        paged, slotted = (torch.tensor(units, dtype=torch.int64) for units in (pages, slots))
        moves = []
        for component, (there, here) in zip(self.layout.components, self._sides, strict=True):
            units = paged if component.index is IndexKind.PAGE else slotted
            runs = ((0, component.num_layers),) if layers is None else stored_layers(component.layers, layers)
            whole = Move(there, here, units)
            moves += [whole.part(slice(at, at + count), slice(None)) for at, count in runs]
        return moves

    def close(self) -> None:
        self._sides = ()
        super().close()
