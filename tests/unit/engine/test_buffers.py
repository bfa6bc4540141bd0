"""A step's tensors live in memory that is used again: no step may see a value of the one before."""

import random

import torch

from shared.engine.batch import Row
from shared.engine.buffers import StepBuffers
from shared.engine.sampler import SampleRow
from shared.protocol.messages import SamplingSpec
from shared.transfer.link import TicketKey

_SAMPLE = SampleRow(SamplingSpec(), 0, 0, (), (), frozenset())


def row(number: int, start: int, count: int, pages: tuple[int, ...], *, samples: int = 1) -> Row:
    tokens = tuple(1000 * number + start + k for k in range(count))
    return Row(TicketKey(number, 1), 0, tokens, start, pages, number, (_SAMPLE,) * samples)


def check(buffers: StepBuffers, rows: list[Row]) -> torch.Tensor:
    """Every value against the plain meaning of the rows; the block tables."""
    batch = buffers.fill(rows)
    assert batch.tokens.tolist() == [token for r in rows for token in r.tokens]
    assert batch.positions.tolist() == [at for r in rows for at in range(r.start, r.end)]
    assert batch.context_lens.tolist() == [r.end for r in rows]
    assert batch.slots.tolist() == [r.slot for r in rows]
    ends = [sum(len(r.tokens) for r in rows[: k + 1]) for k in range(len(rows))]
    assert batch.query_start.tolist() == [0, *ends]
    assert batch.logit_rows.tolist() == [end - 1 for end, r in zip(ends, rows, strict=True) if r.samples]
    width = batch.block_tables.shape[1]
    assert batch.block_tables.tolist() == [[*r.pages] + [0] * (width - len(r.pages)) for r in rows]
    int32, int64 = torch.int32, torch.int64
    kinds = (batch.tokens, batch.positions, batch.query_start, batch.context_lens, batch.block_tables, batch.slots)
    assert [x.dtype for x in (*kinds, batch.logit_rows)] == [int64, int64, int32, int32, int32, int32, int64]
    assert all(x.is_contiguous() for x in kinds)
    return batch.block_tables


def test_rows_that_change_places_shrink_and_grow_leave_nothing_behind() -> None:
    buffers = StepBuffers()
    long, short = row(1, 40, 1, (7, 8, 9)), row(2, 3, 1, (5,))
    check(buffers, [long, short])
    check(buffers, [short, long])
    check(buffers, [short])
    check(buffers, [row(3, 0, 1, ()), short])
    check(buffers, [row(4, 0, 20, (3, 2), samples=0), long, row(5, 8, 4, (6,), samples=2)])
    check(buffers, [long])
    check(buffers, [row(6, 40, 1, (6, 8, 9))])
    check(buffers, [row(7, 40, 1, (6, 5, 9))])


def test_random_steps() -> None:
    dice = random.Random(1)
    buffers = StepBuffers()
    for _ in range(300):
        rows = []
        for _ in range(dice.choice((1, 3, 40))):
            pages = tuple(dice.sample(range(500), dice.choice((0, 1, 2, 9, 30))))
            count = dice.choice((1, 1, 1, 2, 30))
            rows.append(row(dice.randrange(9), dice.randrange(50), count, pages, samples=dice.randrange(3)))
        check(buffers, rows)


def test_steady_decoding_takes_no_new_memory() -> None:
    """The tables and all else stay where they are while lengths and pages grow."""
    buffers = StepBuffers()
    places = set()
    for step in range(60):
        rows = [row(k, 100 + step, 1, tuple(range(k * 100, k * 100 + (100 + step) // 16 + 1))) for k in range(32)]
        check(buffers, rows)
        batch = buffers.fill(rows)
        places.add((batch.tokens.data_ptr(), batch.positions.data_ptr(), batch.slots.data_ptr()))
        places.add((batch.block_tables.data_ptr(), batch.query_start.data_ptr(), batch.context_lens.data_ptr()))
    assert len(places) <= 3  # the tables get wider once
