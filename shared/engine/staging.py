"""State between a device and host memory: gathered into one piece on one side, copied through page-locked memory, and
scattered on the other.

What is more than that memory holds goes in parts through two of them, so that the device copies one part while the
processor gathers or scatters another. No more is ever page-locked, however large the pool.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from kernels.ops import Ops, get_ops
from shared.engine.device_batch import PinnedMemory

STAGE_BYTES = 8 << 20
"""Of one part. A device's own copies are as fast from here on."""
_WORD = 8


@dataclass(frozen=True, slots=True)
class Move:
    """The same units of both sides, as bytes [layers, units, unit bytes]. units: int64 in host memory."""

    there: torch.Tensor
    here: torch.Tensor
    units: torch.Tensor

    def part(self, layers: slice, units: slice) -> "Move":
        return Move(self.there[layers], self.here[layers], self.units[units])

    def cut(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where in `memory` (int64) it finds its place: the words it takes, and in them the units and their bytes."""
        num_units, (num_layers, _, unit_bytes) = len(self.units), self.there.shape
        begin, num_bytes = _even(num_units), num_layers * num_units * unit_bytes  # bytes are aligned as wide loads ask
        words = memory[: begin + -(-num_bytes // _WORD)]
        content = words[begin:].view(torch.uint8)[:num_bytes].view(num_layers, num_units, unit_bytes)
        return words, words[:num_units], content


class Staging:
    """One device's, for units of at most `largest_unit` bytes. Belongs to the thread that computes.

    Everything is queued on torch's current stream: what comes out is gathered behind the kernels that wrote it, and
    what goes in is there for those that are queued later. The processor waits for copies only, by the event that is
    behind each.
    """

    def __init__(self, device: torch.device, ops: Ops, largest_unit: int, stage_bytes: int = STAGE_BYTES) -> None:
        self._num_words = max(stage_bytes, largest_unit) // _WORD + 5  # one unit at least, its number and gaps
        self._memory = torch.zeros(self._num_words, dtype=torch.int64, device=device)
        self._pinned = tuple(PinnedMemory(self._num_words, device) for _ in range(2))
        self._ops, self._host_ops = ops, get_ops("cpu")
        self._rehearse(device)

    def bring_out(self, moves: Sequence[Move]) -> None:
        """From there to here. Returns when all of it is here."""
        under_way: tuple[Move, PinnedMemory] | None = None
        for part, pinned in zip(self._parts(moves), cycle(self._pinned), strict=False):
            self._start_out(part, pinned)
            if under_way is not None:
                self._finish_out(*under_way)
            under_way = part, pinned
        if under_way is not None:
            self._finish_out(*under_way)

    def bring_in(self, moves: Sequence[Move]) -> None:
        """From here to there. When it returns, `here` may change."""
        for part, pinned in zip(self._parts(moves), cycle(self._pinned), strict=False):
            pinned.wait()
            _, units, content = part.cut(pinned.words)
            units.copy_(part.units)
            self._host_ops.gather_units(part.here, units, content)
            words, units, content = part.cut(self._memory)
            pinned.send(words)
            self._ops.scatter_units(part.there, units, content)

    def _start_out(self, part: Move, pinned: PinnedMemory) -> None:
        pinned.wait()
        _, units, _ = part.cut(pinned.words)
        units.copy_(part.units)
        words, units, content = part.cut(self._memory)
        num_head = _even(len(units))
        pinned.send(words[:num_head])
        self._ops.gather_units(part.there, units, content)
        pinned.fetch(words[num_head:], num_head)

    def _finish_out(self, part: Move, pinned: PinnedMemory) -> None:
        pinned.wait()
        _, units, content = part.cut(pinned.words)
        self._host_ops.scatter_units(part.here, units, content)

    def _parts(self, moves: Sequence[Move]) -> Iterator[Move]:
        """All layers of all units where that fits, else some layers of them, else one layer of some."""
        room = self._num_words * _WORD
        for move in moves:
            num_units, (num_layers, _, unit_bytes) = len(move.units), move.there.shape
            if not num_units:
                continue
            layers_each = (room - _WORD * (_even(num_units) + 1)) // (num_units * unit_bytes)
            units_each = num_units
            if layers_each < 1:
                layers_each, units_each = 1, (room - 2 * _WORD) // (unit_bytes + _WORD)
            for layer in range(0, num_layers, layers_each):
                for unit in range(0, num_units, units_each):
                    yield move.part(slice(layer, layer + layers_each), slice(unit, unit + units_each))

    def _rehearse(self, device: torch.device) -> None:
        """Kernels are compiled at their first use."""
        there, here = (torch.zeros(1, 2, 16, dtype=torch.uint8, device=where) for where in (device, "cpu"))
        moves = [Move(there, here, torch.zeros(1, dtype=torch.int64))]
        self.bring_in(moves)
        self.bring_out(moves)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A component [layers, units, …] as bytes [layers, units, unit bytes], in the same memory."""
    return tensor.flatten(2).view(torch.uint8)


def _even(number: int) -> int:
    return number + number % 2
