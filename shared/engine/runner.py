"""Carries a step out, in the compute thread: copies, what moves to and from host memory, one forward over all rows, and
the samples."""

from collections.abc import Callable, Sequence

import torch

from shared.engine.batch import CopyPage, CopySlot, Row, StepPlan, StepResult
from shared.engine.buffers import StepBuffers
from shared.engine.models.base import Batch, Model
from shared.engine.pool import StatePool
from shared.engine.sampler import Sampled, SampleRow, sample
from shared.engine.watch import LayerDone, StepWatch
from shared.runtime.errors import EngineError

SampleFunction = Callable[[torch.Tensor, Sequence[SampleRow]], Sequence[Sampled]]


class Runner:
    """Looks at nothing but the plan and the pool, so the scheduler may go on changing its own books meanwhile."""

    def __init__(self, model: Model, pool: StatePool, sample_rows: SampleFunction = sample) -> None:
        self._model = model
        self._pool = pool
        self._sample_rows = sample_rows
        self._buffers = StepBuffers()
        self._num_layers = pool.layout.model_layers

    @torch.inference_mode()
    def execute(self, plan: StepPlan, watch: StepWatch) -> StepResult:
        """Raises StepUnwanted where the watch says so in the middle of a prompt's rows: then they are half written."""
        for copy in plan.copies:
            if isinstance(copy, CopyPage):
                self._pool.copy_page(copy.source, copy.target)
            elif isinstance(copy, CopySlot):
                self._pool.copy_slot(copy.source, copy.target)
            else:
                self._pool.bring_in(copy.pages, copy.slots)
        for save in plan.saves:
            save.saved.tensors = self._pool.read_units(save.pages, save.slots)
        for load in plan.loads:
            self._pool.write_units(load.saved.tensors, load.pages, load.slots)
            if load.leaves:
                self._pool.bring_out([page for _, page in load.pages], [slot for _, slot in load.slots])
        if not plan.rows:
            return StepResult(())
        self._check_tables(plan.rows)
        batch, between = self._buffers.fill(plan.rows), self._between_layers(plan.rows, watch)
        state = self._pool.tensors
        logits = self._model.forward(batch, state) if between is None else self._model.forward(batch, state, between)
        for row in plan.rows:
            if row.leaves:
                self._bring_out(row, watch.layers_done if row.leaves_by else 0, self._num_layers)
        wanted = [row for row in plan.rows if row.samples]
        if not wanted:
            return StepResult(((),) * len(plan.rows))
        repeats = [len(row.samples) for row in wanted]
        if max(repeats) > 1:
            logits = logits.repeat_interleave(torch.tensor(repeats, device=logits.device), dim=0)  # [samples, vocab]
        drawn = iter(self._draw(logits, [sample for row in wanted for sample in row.samples]))
        return StepResult(tuple(_all_or_error([next(drawn) for _ in row.samples]) for row in plan.rows))

    def _between_layers(self, rows: tuple[Row, ...], watch: StepWatch) -> LayerDone | None:
        """None where it is of no use to look up between layers: a step of plain decoding is short."""
        if all(row.choice is not None for row in rows):
            return None
        ahead = [row for row in rows if row.leaves_by]
        by = min((row.leaves_by for row in ahead), default=0)

        def layer_done(layer: int) -> None:
            watch.check()
            done = layer + 1
            if ahead and (done % by == 0 or done == self._num_layers):
                for row in ahead:
                    self._bring_out(row, watch.layers_done, done)
                watch.are_done(done)

        return layer_done

    def _bring_out(self, row: Row, first_layer: int, after: int) -> None:
        page_tokens, layers = self._pool.layout.page_tokens, range(first_layer, after)
        self._pool.bring_out(row.pages[row.start // page_tokens : -(-row.end // page_tokens)], (row.slot,), layers)

    def _check_tables(self, rows: tuple[Row, ...]) -> None:
        """Compiled kernels do not check bounds: a row beyond its own pages would write into somebody else's."""
        page_tokens = self._pool.layout.page_tokens
        for row in rows:
            if row.pages and row.end > len(row.pages) * page_tokens:
                raise EngineError(f"{row.key}: position {row.end - 1} lies beyond {len(row.pages)} pages")

    def _draw(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[Sampled | EngineError]:
        """A row that cannot be sampled (a bias that forbids every token, a logit that is NaN) spoils no other."""
        try:
            return list(self._sample_rows(logits, rows))
        except EngineError:
            return [self._draw_one(logits[k : k + 1], row) for k, row in enumerate(rows)]

    def _draw_one(self, logits: torch.Tensor, row: SampleRow) -> Sampled | EngineError:
        try:
            return self._sample_rows(logits, [row])[0]
        except EngineError as error:
            return error


def _all_or_error(drawn: list[Sampled | EngineError]) -> tuple[Sampled, ...] | EngineError:
    tokens: list[Sampled] = []
    for one in drawn:
        if isinstance(one, EngineError):
            return one
        tokens.append(one)
    return tuple(tokens)


def build_batch(rows: Sequence[Row]) -> Batch:
    """The rows as tensors of their own."""
    return StepBuffers().fill(rows)
