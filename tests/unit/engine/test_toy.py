from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.models.base import Batch
from shared.engine.models.toy import EOS_TOKEN, VOCAB_SIZE, Toy
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout

NUM_PAGES, NUM_SLOTS = 40, 4


def fresh_state(page_tokens: int) -> tuple[torch.Tensor, ...]:
    layout = PoolLayout(Toy().components(page_tokens), NUM_PAGES, NUM_SLOTS)
    buffer = memoryview(bytearray(layout.total_bytes))
    return tuple(torch.from_numpy(layout.view(buffer, index)) for index in range(len(layout.components)))


def batch_of(rows: list[tuple[list[int], int, list[int], int]]) -> Batch:
    """Rows of (tokens, start, pages, slot); logits of every token."""
    lengths = [len(tokens) for tokens, *_ in rows]
    width = max(len(pages) for _, _, pages, _ in rows)
    return Batch(
        tokens=torch.tensor([t for tokens, *_ in rows for t in tokens]),
        positions=torch.tensor([start + k for tokens, start, *_ in rows for k in range(len(tokens))]),
        query_start=torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32),
        context_lens=torch.tensor([start + len(tokens) for tokens, start, *_ in rows], dtype=torch.int32),
        block_tables=torch.tensor([pages + [0] * (width - len(pages)) for _, _, pages, _ in rows], dtype=torch.int32),
        slots=torch.tensor([slot for *_, slot in rows], dtype=torch.int32),
        logit_rows=torch.arange(sum(lengths)),
    )


def run(tokens: list[int], cuts: list[int], page_tokens: int, pages: list[int]) -> torch.Tensor:
    state = fresh_state(page_tokens)
    borders = sorted({0, *cuts, len(tokens)})
    parts = [Toy().forward(batch_of([(tokens[a:b], a, pages, 1)]), state) for a, b in pairwise(borders)]
    return torch.cat(parts)


@given(st.data())
def test_logits_do_not_depend_on_chunks_or_pages(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=70))
    cuts = data.draw(st.lists(st.integers(1, len(tokens)), max_size=6))
    page_tokens = data.draw(st.sampled_from([2, 5, 16]))
    pages = data.draw(st.permutations(range(NUM_PAGES)))
    whole = run(tokens, [], 4, list(range(NUM_PAGES)))
    assert torch.equal(run(tokens, cuts, page_tokens, pages), whole)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    one, two = [5, 6, 7, 8, 9], [200, 3]
    state = fresh_state(4)
    both = Toy().forward(batch_of([(one, 0, [7, 2], 3), (two, 0, [5], 0)]), state)
    assert torch.equal(both, torch.cat([run(one, [], 4, [0, 1]), run(two, [], 4, [0])]))


@pytest.mark.parametrize("length", [1, 3, 8, 21])
def test_every_byte_of_the_state_counts(length: int) -> None:
    """Any row of any component of any layer that carries state changes the next logits when it is lost."""
    tokens, pages = list(range(40, 40 + length)), [3, 0, 5, 1, 9, 8]
    components = Toy().components(4)

    def next_logits(component: int, layer: int, row: int, outer: int) -> torch.Tensor:
        state = fresh_state(4)
        Toy().forward(batch_of([(tokens, 0, pages, 2)]), state)
        if component >= 0:
            kind = components[component].index
            if kind is IndexKind.PAGE:
                state[component][layer, pages[row // 4], outer, row % 4] = 0
            else:
                state[component][layer, 2, row] = 0
        return Toy().forward(batch_of([([77], length, pages, 2)]), state)

    whole = next_logits(-1, 0, 0, 0)
    window = range(max(0, length - 7), length)
    lost = [(0, layer, row, outer) for layer in (0, 1) for row in range(length) for outer in (0, 1)]
    lost += [(1, layer, 0, 0) for layer in (0, 1)]
    lost += [(2, layer, row % 8, 0) for layer in (0, 1) for row in window]
    for where in lost:
        assert not torch.equal(next_logits(*where), whole), where


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_position_counts(shift: int) -> None:
    tokens, pages = list(range(30)), list(range(10))
    results = []
    for position in (30, 30 + shift):
        state = fresh_state(4)
        Toy().forward(batch_of([(tokens, 0, pages, 0)]), state)
        results.append(Toy().forward(batch_of([([9], position, pages, 0)]), state).argmax())
    assert results[0] != results[1]


def test_a_slot_that_was_not_cleared_shows() -> None:
    dirty = fresh_state(4)
    Toy().forward(batch_of([([1, 2, 3], 0, [0], 0)]), dirty)
    again = Toy().forward(batch_of([([1, 2, 3], 0, [1], 0)]), dirty)
    assert not torch.equal(again, run([1, 2, 3], [], 4, [0]))


def test_the_end_token_is_reachable_and_nothing_ties() -> None:
    logits = run([k % 256 for k in range(900)], [], 64, list(range(NUM_PAGES)))
    assert (logits.argmax(dim=1) == EOS_TOKEN).any()
    best = logits.topk(2).values
    assert (best[:, 0] > best[:, 1]).all()
