"""Drives a model without an engine: sequences in a paged pool, whole prompts or single steps in one batch."""

import os
import random
from functools import cache
from pathlib import Path

import numpy as np
import torch

from shared.engine.models.base import Batch, Model
from shared.engine.models.registry import load_model
from shared.engine.weights.catalog import PreparedModel, prepare
from shared.runtime.settings import DEFAULT_MODEL
from shared.state.layout import PoolLayout


def model_cache_dir() -> Path:
    """Kept between runs: preparing the real model takes seconds and a download."""
    return Path(os.environ.get("BATON_CACHE", Path.home() / ".cache" / "baton"))


@cache
def real_prepared() -> PreparedModel:
    return prepare(DEFAULT_MODEL, model_cache_dir())


@cache
def real_model(kv_dtype: str = "float32", weights: str | None = "float32") -> Model:
    """weights: None for what workers take where nothing is said."""
    return load_model(real_prepared().directory, weights=weights, kv_dtype=kv_dtype)


class PagedSequences:
    """`num_sequences` sequences of up to `max_len` tokens each, whose pages lie scattered over the pool."""

    def __init__(self, model: Model, num_sequences: int, max_len: int, page_tokens: int = 16) -> None:
        self.model, self.lengths = model, [0] * num_sequences
        num_pages = -(-max_len // page_tokens)
        pages = list(range(num_sequences * num_pages))
        random.Random(1).shuffle(pages)
        self._tables = torch.tensor(pages, dtype=torch.int32).view(num_sequences, num_pages)
        components = model.components(page_tokens)
        layout = PoolLayout(components, num_pages=len(pages), num_slots=num_sequences)
        pool = memoryview(bytearray(layout.total_bytes))
        # What was never written must never be read: NaN would spread into every logit.
        np.frombuffer(pool, dtype=np.uint8)[:] = 0xFF
        self.state = tuple(torch.from_numpy(layout.view(pool, i)) for i in range(len(components)))

    def step(
        self, tokens: dict[int, list[int]], *, every_row: bool = False, rows: list[int] | None = None
    ) -> torch.Tensor:
        """New tokens by sequence. Logits after each sequence's last one, after every one, or of `rows`: [R, vocab]."""
        starts, positions = [0], []
        for sequence, new in tokens.items():
            begin = self.lengths[sequence]
            positions += range(begin, begin + len(new))
            self.lengths[sequence] += len(new)
            starts.append(len(positions))
        if rows is None:
            rows = list(range(len(positions))) if every_row else [start - 1 for start in starts[1:]]
        sequences = list(tokens)
        batch = Batch(
            tokens=torch.tensor([token for new in tokens.values() for token in new]),
            positions=torch.tensor(positions),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([self.lengths[s] for s in sequences], dtype=torch.int32),
            block_tables=self._tables[sequences],
            slots=torch.tensor(sequences, dtype=torch.int32),
            logit_rows=torch.tensor(rows, dtype=torch.int64),
        )
        return self.model.forward(batch, self.state)

    def fork(self, source: int) -> None:
        """All sequences become what `source` is."""
        for sequence, pages in enumerate(self._tables):
            if sequence != source:
                self.lengths[sequence] = self.lengths[source]
                for state in self.state:
                    state[:, pages] = state[:, self._tables[source]]
