"""A step's batch on its way to a GPU: laid out in one piece of pinned host memory, and sent in one copy."""

from dataclasses import dataclass, fields

import torch

from shared.engine.models.base import Batch

_FIRST_WORDS = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """num_tokens T, num_rows S, width M, num_wanted R of a Batch."""

    num_tokens: int
    num_rows: int
    width: int
    num_wanted: int

    @classmethod
    def of(cls, batch: Batch) -> "Shape":
        num_rows, width = batch.block_tables.shape
        return cls(len(batch.tokens), num_rows, width, len(batch.logit_rows))

    @property
    def num_words(self) -> int:
        """Of 8 bytes each, that a batch of this shape takes."""
        return 2 * self.num_tokens + self.num_wanted + -(-(3 * self.num_rows + 1 + self.num_rows * self.width) // 2)


def batch_over(memory: torch.Tensor, shape: Shape) -> Batch:
    """A batch whose tensors are parts of `memory` (int64): what is 8 bytes wide first, so that all of it is aligned."""
    rows, wide = shape.num_rows, 2 * shape.num_tokens + shape.num_wanted
    tokens, positions, wanted = torch.split(memory[:wide], [shape.num_tokens, shape.num_tokens, shape.num_wanted])
    narrow = memory[wide : shape.num_words].view(torch.int32)[: 3 * rows + 1 + rows * shape.width]
    starts, contexts, slots, tables = torch.split(narrow, [rows + 1, rows, rows, rows * shape.width])
    return Batch(
        tokens=tokens,
        positions=positions,
        query_start=starts,
        context_lens=contexts,
        block_tables=tables.view(rows, shape.width),
        slots=slots,
        logit_rows=wanted,
    )


class PinnedMemory:
    """Host memory that a device copies from and to by itself. `wait` before touching it: a copy may be under way."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.words = torch.zeros(num_words, dtype=torch.int64, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, target: torch.Tensor) -> None:
        """Starts the copy of as many words as `target` has, on the current stream."""
        target.copy_(self.words[: len(target)], non_blocking=True)
        self._mark()

    def fetch(self, source: torch.Tensor, at: int) -> None:
        """Starts the copy of all of `source` to the words from `at` on, on the current stream."""
        self.words[at : at + len(source)].copy_(source, non_blocking=True)
        self._mark()

    def _mark(self) -> None:
        if self._sent is not None:
            self._sent.record()


class Upload:
    """Batches of any shape, each into new device memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = PinnedMemory(_FIRST_WORDS, device)

    def __call__(self, batch: Batch) -> Batch:
        shape = Shape.of(batch)
        self._pinned.wait()
        if shape.num_words > len(self._pinned.words):
            self._pinned = PinnedMemory(2 * shape.num_words, self._device)
        here = batch_over(self._pinned.words, shape)
        for field in fields(Batch):
            getattr(here, field.name).copy_(getattr(batch, field.name))
        memory = torch.empty(shape.num_words, dtype=torch.int64, device=self._device)
        self._pinned.send(memory)
        return batch_over(memory, shape)
