"""A step as it is carried out: what must not reach the pool, and rows that cannot be sampled."""

from collections.abc import Iterator

import pytest
import torch

from shared.engine.batch import Row, StepPlan
from shared.engine.models.base import Batch
from shared.engine.models.toy import Toy
from shared.engine.pool import StatePool
from shared.engine.runner import Runner
from shared.engine.sampler import SampleRow
from shared.engine.watch import LayerDone, StepWatch
from shared.protocol.messages import SamplingSpec
from shared.runtime.errors import EngineError
from shared.state.layout import PoolLayout
from shared.transfer.link import TicketKey

NOT_WATCHED = StepWatch(lambda num_layers: None)
SAMPLE = SampleRow(SamplingSpec(temperature=0.0), 0, 0, (), (), frozenset())


@pytest.fixture
def pool() -> Iterator[StatePool]:
    pool = StatePool(PoolLayout(Toy().components(4), 8, 4))
    yield pool
    pool.close()


def row(number: int, start: int, count: int, pages: tuple[int, ...], num_samples: int = 1) -> Row:
    return Row(TicketKey(number, 1), None, (9,) * count, start, pages, number, (SAMPLE,) * num_samples)


@pytest.mark.parametrize(("start", "count"), [(0, 9), (8, 1), (7, 2)])
def test_a_row_beyond_its_own_pages_writes_nothing(pool: StatePool, start: int, count: int) -> None:
    for tensor in pool.tensors:
        tensor.fill_(99)
    runner = Runner(Toy(), pool)
    with pytest.raises(EngineError, match="position 8 lies beyond 2 pages"):
        runner.execute(StepPlan((), (row(1, 0, 3, (4,)), row(2, start, count, (5, 6)))), NOT_WATCHED)
    assert all(bool((tensor == 99).all()) for tensor in pool.tensors)
    assert len(runner.execute(StepPlan((), (row(1, 0, 4, (4,)), row(2, 0, 8, (5, 6)))), NOT_WATCHED).sampled) == 2


class BrokenSecond(Toy):
    def forward(
        self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
    ) -> torch.Tensor:
        logits = super().forward(batch, state, layer_done)
        logits[1, 3] = float("nan")
        return logits


def test_logits_that_are_no_numbers_lose_their_row_alone(pool: StatePool) -> None:
    rows = (row(0, 0, 2, (0,), 2), row(1, 0, 2, (1,)), row(2, 0, 2, (2,), 0), row(3, 0, 2, (3,), 1))
    first, broken, silent, last = Runner(BrokenSecond(), pool).execute(StepPlan((), rows), NOT_WATCHED).sampled
    assert isinstance(broken, EngineError)
    assert silent == ()
    assert isinstance(first, tuple)
    assert [len(first), first[0]] == [2, first[1]]
    assert last == first[:1]
