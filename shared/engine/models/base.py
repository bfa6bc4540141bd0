"""What the runner needs of a model, and the batch it hands over."""

from dataclasses import dataclass
from typing import Protocol

import torch

from shared.engine.watch import LayerDone
from shared.state.components import StateComponent


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: the new tokens of S sequences, one after the other (T in all).

    tokens, positions: [T] int64. query_start: [S+1] int32, where each sequence's tokens begin. context_lens: [S] int32,
    positions with state *after* this step. block_tables: [S, M] int32 physical pages, padded with 0.
    slots: [S] int32 request slots. logit_rows: [R] int64, indices into T whose logits are wanted.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor


class Model(Protocol):
    """A loaded model. `state[i]` is component i of the pool as a tensor [layers, units, *unit_shape]."""

    identity: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    def components(self, page_tokens: int) -> tuple[StateComponent, ...]: ...

    def forward(
        self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
    ) -> torch.Tensor:
        """Writes the new positions' state in place and returns float32 logits [R, vocab]. In the compute thread.
        layer_done: called with each layer's number once its state is written. What it raises ends the step."""
