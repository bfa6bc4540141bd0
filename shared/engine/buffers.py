"""A step's rows as tensors, in memory that is taken once: block tables and all, filled in place.

A row of the block table is written only where its pages differ from those of the row that stood there in the step
before, which in steady decoding is once a page.
"""

from collections.abc import Sequence

import numpy as np
import torch

from shared.engine.batch import Row
from shared.engine.models.base import Batch

_FIRST_ROWS = 32
_FIRST_TOKENS = 512
_TABLE_STEP = 8


def table_width(num_pages: int) -> int:
    """Columns of a block table whose longest row has that many pages: a multiple that seldom changes."""
    return -(-(num_pages or 1) // _TABLE_STEP) * _TABLE_STEP


class StepBuffers:
    """What `fill` returns is valid until the next `fill`. The compute thread owns it."""

    def __init__(self) -> None:
        self._tables = np.zeros((0, 0), np.int32)
        self._in_table: list[tuple[int, ...]] = []
        """What each row of the table holds, the rest of it being 0."""
        self._make_rows(_FIRST_ROWS)
        self._make_tokens(_FIRST_TOKENS)

    def fill(self, rows: Sequence[Row]) -> Batch:
        """Logits are wanted of the last token of each row that samples."""
        num_rows, num_tokens = len(rows), sum(len(row.tokens) for row in rows)
        if num_rows > len(self._slots):
            self._make_rows(2 * num_rows)
        if num_tokens > len(self._tokens):
            self._make_tokens(2 * num_tokens)
        starts, ends = self._starts[: num_rows + 1], self._ends[:num_rows]
        ends[:] = [row.end for row in rows]
        self._slots[:num_rows] = [row.slot for row in rows]
        if num_tokens == num_rows:  # every row decodes
            starts[:] = np.arange(num_rows + 1)
            self._tokens[:num_tokens] = [row.tokens[0] for row in rows]
            np.subtract(ends, 1, out=self._positions[:num_tokens])
        else:
            np.cumsum([len(row.tokens) for row in rows], out=starts[1:])
            self._tokens[:num_tokens] = [token for row in rows for token in row.tokens]
            offsets = np.repeat(ends - starts[1:], np.diff(starts))
            np.add(np.arange(num_tokens), offsets, out=self._positions[:num_tokens])
        sampling = [k for k, row in enumerate(rows) if row.samples]
        np.subtract(starts[1:][sampling], 1, out=self._wanted[: len(sampling)])
        return Batch(
            tokens=torch.from_numpy(self._tokens[:num_tokens]),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            query_start=torch.from_numpy(starts),
            context_lens=torch.from_numpy(ends),
            block_tables=torch.from_numpy(self._fill_tables(rows)),
            slots=torch.from_numpy(self._slots[:num_rows]),
            logit_rows=torch.from_numpy(self._wanted[: len(sampling)]),
        )

    def _fill_tables(self, rows: Sequence[Row]) -> np.ndarray:
        """[S, M], contiguous; 0 beyond a row's own pages."""
        width = table_width(max(len(row.pages) for row in rows))
        if width != self._tables.shape[1] or len(rows) > len(self._tables):
            self._tables = np.zeros((max(len(rows), len(self._slots)), width), np.int32)
            self._in_table = [()] * len(self._tables)
        tables, held = self._tables, self._in_table
        for k, row in enumerate(rows):
            before, pages = held[k], row.pages
            if before == pages:
                continue
            tables[k, : len(pages)] = pages
            if len(before) > len(pages):
                tables[k, len(pages) :] = 0
            held[k] = pages
        return tables[: len(rows)]

    def _make_rows(self, count: int) -> None:
        self._starts = np.zeros(count + 1, np.int32)
        self._ends, self._slots = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self._wanted = np.zeros(count, np.int64)

    def _make_tokens(self, count: int) -> None:
        self._tokens, self._positions = np.zeros(count, np.int64), np.zeros(count, np.int64)
