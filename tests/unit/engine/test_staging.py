"""What passes between a device and host memory in parts: every byte of it, and nothing beside it. The device of these
tests is a second place in the CPU's memory, whose copies are done at once; what must not be touched meanwhile is
checked by the order of calls."""

from collections.abc import Sequence

import pytest
import torch

from kernels.reference import ReferenceOps
from shared.engine import staging as module
from shared.engine.device_batch import PinnedMemory
from shared.engine.staging import Move, Staging, as_bytes

CPU = torch.device("cpu")


class NotingOps(ReferenceOps):
    """Notes how many layers and units each call was for."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int]] = []

    def gather_units(self, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
        self.parts.append((len(state), len(units)))
        super().gather_units(state, units, buffer)

    def scatter_units(self, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
        self.parts.append((len(state), len(units)))
        super().scatter_units(state, units, buffer)


def some_moves(sizes: Sequence[int], num_layers: int, num_units: int, chosen: Sequence[int]) -> list[Move]:
    moves = []
    for size in sizes:
        there, here = (torch.randint(256, (num_layers, num_units, size), dtype=torch.uint8) for _ in range(2))
        moves.append(Move(there, here, torch.tensor(chosen, dtype=torch.int64)))
    return moves


@pytest.mark.parametrize("stage_bytes", [1, 200, 1000, 5000, 1 << 20])
@pytest.mark.parametrize("chosen", [[], [3], [9, 0, 1, 2, 5], list(range(10))])
def test_all_of_it_arrives_in_parts_of_any_size(stage_bytes: int, chosen: list[int]) -> None:
    sizes = (1, 16, 77, 300)
    staging = Staging(CPU, ReferenceOps(), max(sizes), stage_bytes)
    out = some_moves(sizes, 5, 10, chosen)
    expected = [move.here.clone() for move in out]
    for move, here in zip(out, expected, strict=True):
        here[:, chosen] = move.there[:, chosen]
    staging.bring_out(out)
    assert all(torch.equal(move.here, here) for move, here in zip(out, expected, strict=True))
    into = some_moves(sizes, 5, 10, chosen)
    expected = [move.there.clone() for move in into]
    for move, there in zip(into, expected, strict=True):
        there[:, chosen] = move.here[:, chosen]
    staging.bring_in(into)
    assert all(torch.equal(move.there, there) for move, there in zip(into, expected, strict=True))


@pytest.mark.parametrize("stage_bytes", [1, 40, 1 << 12])
@pytest.mark.parametrize("size", range(1, 40))
def test_the_largest_unit_fits_whatever_its_size(size: int, stage_bytes: int) -> None:
    moves = some_moves([size], 2, 3, [2, 0])
    Staging(CPU, ReferenceOps(), size, stage_bytes).bring_out(moves)
    assert torch.equal(moves[0].here[:, [2, 0]], moves[0].there[:, [2, 0]])


def test_parts_are_as_large_as_they_can_be() -> None:
    ops = NotingOps()
    staging = Staging(CPU, ops, 1000, 100_000)
    ops.parts.clear()
    chosen = list(range(30))
    staging.bring_out(some_moves([1000], 8, 40, chosen))
    staging.bring_in(some_moves([1000], 8, 40, chosen))
    assert ops.parts == [(3, 30), (3, 30), (2, 30)] * 2
    ops.parts.clear()
    staging.bring_out(some_moves([1000], 2, 150, range(150)))
    assert ops.parts == [(1, 99), (1, 51)] * 2


class Strict(PinnedMemory):
    """As late as a device can be: what was fetched comes when it is waited for, and until then nothing that was sent
    may have changed."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        super().__init__(num_words, device)
        self._sent_words: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._to_come: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait(self) -> None:
        assert all(torch.equal(words, sent) for words, sent in self._sent_words)
        for words, source in self._to_come:
            words.copy_(source)
        self._sent_words, self._to_come = [], []

    def send(self, target: torch.Tensor) -> None:
        target.copy_(self.words[: len(target)])
        self._sent_words.append((self.words[: len(target)], target.clone()))

    def fetch(self, source: torch.Tensor, at: int) -> None:
        self._to_come.append((self.words[at : at + len(source)], source.clone()))


def test_no_page_locked_memory_is_touched_while_a_copy_may_be_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PinnedMemory", Strict)
    staging = Staging(CPU, ReferenceOps(), 100, 700)
    out, into, again = (some_moves([64, 100], 6, 10, chosen) for chosen in ([1, 2, 3, 8, 0], [9, 4, 7], [3, 5, 6, 0]))
    staging.bring_out(out)
    staging.bring_in(into)
    staging.bring_out(again)
    for move in out + into + again:
        assert torch.equal(move.here[:, move.units], move.there[:, move.units])
    for pinned in staging._pinned:
        pinned.wait()


def test_one_part_is_copied_while_another_is_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Noting(PinnedMemory):
        def fetch(self, source: torch.Tensor, at: int) -> None:
            events.append("copy")
            super().fetch(source, at)

    class Host(ReferenceOps):
        def scatter_units(self, state: torch.Tensor, units: torch.Tensor, buffer: torch.Tensor) -> None:
            events.append("scatter")
            super().scatter_units(state, units, buffer)

    monkeypatch.setattr(module, "PinnedMemory", Noting)
    monkeypatch.setattr(module, "get_ops", lambda device: Host())
    staging = Staging(CPU, ReferenceOps(), 100, 600)
    events.clear()
    staging.bring_out(some_moves([100], 4, 5, range(5)))
    assert events == ["copy", "copy", "scatter", "copy", "scatter", "copy", "scatter", "scatter"]


def test_bytes_of_a_component_are_its_own_memory() -> None:
    for kind in (torch.float32, torch.float16, torch.uint8):
        component = torch.zeros(2, 3, 4, 5, dtype=kind)
        view = as_bytes(component)
        assert view.shape == (2, 3, 20 * kind.itemsize)
        view[1, 2] = 255
        assert bool((component[1, 2].view(torch.uint8) == 255).all())
        assert not bool(component[0].any())


def test_kernels_are_there_before_the_first_state_moves() -> None:
    ops = NotingOps()
    Staging(CPU, ops, 16)
    assert ops.parts == [(1, 1), (1, 1)]
