"""Decode on a GPU as recorded graphs: a step of one token a row is padded to one of a few sizes, and all its kernels
are started by one call. Everything else runs eagerly.

A graph knows addresses, not values: each size has its own static batch in device memory, with a block table as wide as
the longest sequence needs. A row of padding is one token at position -1 of a context of 0 positions: kernels store
nothing for it, and nobody looks at its logits.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from shared.engine.device_batch import PinnedMemory, Shape, Upload, batch_over
from shared.engine.models.base import Batch, Model
from shared.engine.watch import LayerDone
from shared.state.components import StateComponent

PADDING = -1

Replay = Callable[[], torch.Tensor]
Record = Callable[[Replay], Replay]
"""Takes a function that computes in static memory. Returns one that does the same again, without Python in between; its
result lies in the same memory each time."""


class DeviceModel:
    """A model on a device, for a runner whose batches are in host memory. Logits are valid until the next step.

    sizes: batch sizes, ascending, that are recorded while it is made; none without a recorder. Steps of one token a row
    that fit none run eagerly.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        state: tuple[torch.Tensor, ...],
        sizes: Sequence[int],
        table_width: int,
        record: Record | None,
    ) -> None:
        self.identity = model.identity
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.eos_token_ids = model.eos_token_ids
        self._model = model
        self._upload = Upload(device)
        self._sizes = tuple(sizes) if record is not None else ()
        self._table_width = table_width
        self._graphs: dict[int, _DecodeGraph] = {}
        if record is not None:
            # The largest first: the smaller ones then find all the memory they need in what it has taken.
            for size in reversed(self._sizes):
                self._graphs[size] = _DecodeGraph(model, device, state, size, table_width, record)

    def components(self, page_tokens: int) -> tuple[StateComponent, ...]:
        return self._model.components(page_tokens)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
    ) -> torch.Tensor:
        """A recorded step says nothing of its layers."""
        graph = self._graph_for(batch)
        return self._model.forward(self._upload(batch), state, layer_done) if graph is None else graph.run(batch)

    def _graph_for(self, batch: Batch) -> "_DecodeGraph | None":
        num_rows, width = batch.block_tables.shape
        if len(batch.tokens) != num_rows or not len(batch.logit_rows) or width > self._table_width:
            return None
        at = bisect_left(self._sizes, num_rows)
        return self._graphs[self._sizes[at]] if at < len(self._sizes) else None


class _DecodeGraph:
    """One size: its static batch on both sides, and the recording that computes on the device's."""

    @torch.inference_mode()
    def __init__(
        self,
        model: Model,
        device: torch.device,
        state: tuple[torch.Tensor, ...],
        size: int,
        table_width: int,
        record: Record,
    ) -> None:
        shape = Shape(num_tokens=size, num_rows=size, width=table_width, num_wanted=size)
        self._pinned = PinnedMemory(shape.num_words, device)
        self._memory = torch.zeros(shape.num_words, dtype=torch.int64, device=device)
        self._here, there = batch_over(self._pinned.words, shape), batch_over(self._memory, shape)
        self._here.query_start.copy_(torch.arange(size + 1))
        self._here.logit_rows.copy_(torch.arange(size))
        self._pad_from(0)
        self._pinned.send(self._memory)
        self._replay = record(lambda: model.forward(there, state))

    def run(self, batch: Batch) -> torch.Tensor:
        """What a row's table holds beyond its own pages is left of earlier steps: ids of pages, which nobody reads."""
        here = self._here
        count, width = batch.block_tables.shape
        self._pinned.wait()
        here.tokens[:count] = batch.tokens
        here.positions[:count] = batch.positions
        here.context_lens[:count] = batch.context_lens
        here.slots[:count] = batch.slots
        here.block_tables[:count, :width] = batch.block_tables
        self._pad_from(count)
        self._pinned.send(self._memory)
        logits = self._replay()[:count]
        if len(batch.logit_rows) == count:
            return logits
        return logits[batch.logit_rows.to(logits.device)]

    def _pad_from(self, count: int) -> None:
        self._here.positions[count:] = PADDING
        self._here.context_lens[count:] = 0


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8 … and max_rows itself."""
    return (*(1 << power for power in range((max_rows - 1).bit_length())), max_rows)


def record_cuda() -> Record:
    """Recordings that share one memory for what they compute in between, since only one of them runs at a time."""
    memory = torch.cuda.graph_pool_handle()

    def record(work: Replay) -> Replay:
        # Once unrecorded, and not on the default stream: libraries take their workspaces the first time.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            logits = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay

    return record
