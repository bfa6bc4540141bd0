"""A pool whose state lives on a device, and comes and goes through the memfd, because links move host memory only.

What a prompt's chunk wrote is copied out before the chunk is told; what a link has brought is copied in by the first
step of its group. Everything else stays on the device. Host memory is taken only by pages that came or went.
"""

from collections.abc import Sequence

import torch

from shared.engine.pieces import stored_layers
from shared.engine.pool import StatePool
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout


class StagedPool(StatePool):
    """`tensors` are on the device; `buffer` and the descriptor are the host's side, of the same layout."""

    def __init__(self, layout: PoolLayout, device: torch.device) -> None:
        super().__init__(layout)
        self._host = self.tensors
        try:
            self.tensors = tuple(torch.zeros(host.shape, dtype=host.dtype, device=device) for host in self._host)
        except BaseException:
            self.close()
            raise

    def bring_in(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        for host, there, units in self._sides(pages, slots):
            there[:, units] = host[:, units].to(there.device)

    def bring_out(self, pages: Sequence[int], slots: Sequence[int], layers: range | None = None) -> None:
        for host, there, units in self._sides(pages, slots, layers):
            host[:, units] = there[:, units].cpu()

    def _sides(
        self, pages: Sequence[int], slots: Sequence[int], layers: range | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
        """Host, device and units of each component that has some, in runs of its layers."""
        sides = []
        for component, host, there in zip(self.layout.components, self._host, self.tensors, strict=True):
            units = list(pages if component.index is IndexKind.PAGE else slots)
            runs = ((0, component.num_layers),) if layers is None else stored_layers(component.layers, layers)
            sides += [(host[at : at + count], there[at : at + count], units) for at, count in runs if units]
        return sides

    def close(self) -> None:
        self._host = ()
        super().close()
