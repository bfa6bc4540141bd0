"""What a GPU is given, as far as a CPU can tell: batches in one piece of memory, and decode steps padded to recorded
sizes. The recorder of these tests computes again in the static memory, as a replayed graph does."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference import ReferenceOps
from shared.engine.batch import Row
from shared.engine.buffers import StepBuffers, table_width
from shared.engine.device import on_device, place
from shared.engine.device_batch import Upload
from shared.engine.graphs import DeviceModel, Record, Replay, graph_sizes
from shared.engine.models.base import Batch, Model
from shared.engine.models.registry import load_model
from shared.engine.pool import StatePool
from shared.engine.runner import build_batch
from shared.engine.sampler import SampleRow
from shared.engine.settings import EngineSettings
from shared.engine.staged_pool import StagedPool
from shared.engine.watch import LayerDone
from shared.engine.weights.catalog import prepare
from shared.protocol.messages import SamplingSpec
from shared.runtime.settings import ConfigError
from shared.state.components import IndexKind, StateComponent
from shared.transfer.link import TicketKey
from tests.support_tiny_model import tiny_weights, write_hf

CPU = torch.device("cpu")
PAGE_TOKENS, NUM_PAGES, MAX_LEN = 4, 200, 64
SIZES = (1, 2, 4, 8, 11)
_SAMPLE = SampleRow(SamplingSpec(), 0, 0, (), (), frozenset())


def again(work: Replay) -> Replay:
    return work


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny random decoder on the ops that say what padding is."""
    home: Path = tmp_path_factory.mktemp("tiny")
    loaded: Any = load_model(prepare(str(write_hf(home / "hf", tiny_weights())), home).directory)
    loaded._ops = ReferenceOps()
    return loaded  # type: ignore[no-any-return]


def noise(model: Model, seed: int) -> tuple[torch.Tensor, ...]:
    (component,) = model.components(PAGE_TOKENS)
    shape = (component.num_layers, NUM_PAGES, *component.unit_shape)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)),)


def decode_rows(dice: random.Random, count: int, *, samples: bool = True) -> list[Row]:
    """Each with pages of its own, at any position of its last page."""
    free = list(range(NUM_PAGES))
    dice.shuffle(free)
    rows = []
    for number in range(count):
        length = dice.randint(1, MAX_LEN)
        pages = tuple(free.pop() for _ in range(-(-length // PAGE_TOKENS)))
        drawn = (_SAMPLE,) if samples or dice.random() < 0.5 else ()
        rows.append(Row(TicketKey(number + 1, 1), 0, (dice.randrange(250),), length - 1, pages, number, drawn))
    return rows


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), counts=st.lists(st.integers(1, 11), min_size=1, max_size=4))
def test_padding_changes_no_logits_and_stores_nothing(model: Model, seed: int, counts: list[int]) -> None:
    """Step after step, so that what a larger one has left behind is there for a smaller one."""
    dice = random.Random(seed)
    mine, alone = noise(model, seed), noise(model, seed)
    padded = DeviceModel(model, CPU, mine, SIZES, table_width(MAX_LEN // PAGE_TOKENS), again)
    assert torch.equal(mine[0], alone[0])
    buffers, written = StepBuffers(), set[int]()
    for count in counts:
        batch = buffers.fill(decode_rows(dice, count, samples=False))
        expected, found = model.forward(batch, alone), padded.forward(batch, mine)
        assert found.shape == (len(batch.logit_rows), model.vocab_size)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine[0], alone[0], rtol=1e-4, atol=1e-4)
        tables, contexts = batch.block_tables.tolist(), batch.context_lens.tolist()
        written |= {row[(end - 1) // PAGE_TOKENS] for row, end in zip(tables, contexts, strict=True)}
        others = [page for page in range(NUM_PAGES) if page not in written]
        assert torch.equal(mine[0][:, others], alone[0][:, others])


class Named:
    """A model that says which batches reach it; its logits are the tokens."""

    identity, vocab_size, max_model_len, eos_token_ids = "named", 3, MAX_LEN, frozenset({1})

    def __init__(self) -> None:
        self.seen: list[Batch] = []

    def components(self, page_tokens: int) -> Any:
        return ("what it has",)

    def forward(
        self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
    ) -> torch.Tensor:
        self.seen.append(batch)
        return batch.tokens[batch.logit_rows].float().unsqueeze(1)


def recorder(sizes: list[int], replayed: list[int]) -> Record:
    def record(work: Replay) -> Replay:
        size = len(work())
        sizes.append(size)

        def replay() -> torch.Tensor:
            replayed.append(size)
            return work()

        return replay

    return record


@pytest.fixture
def named() -> tuple[Named, DeviceModel, list[int]]:
    inner, sizes, replayed = Named(), list[int](), list[int]()
    outer = DeviceModel(inner, CPU, (), SIZES, 8, recorder(sizes, replayed))
    assert sizes == [11, 8, 4, 2, 1]
    for batch in inner.seen:
        assert set(batch.positions.tolist()) == {-1}
        assert set(batch.context_lens.tolist()) == {0}
        assert batch.query_start.tolist() == list(range(len(batch.tokens) + 1))
    inner.seen.clear()
    return inner, outer, replayed


def row(token: int, *, pages: int = 2, count: int = 1, samples: bool = True) -> Row:
    tokens, drawn = (token,) * count, (_SAMPLE,) if samples else ()
    return Row(TicketKey(1, 1), 0, tokens, 4, tuple(range(pages)), 0, drawn)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 11), (11, 11)])
def test_the_smallest_size_that_holds_the_step_is_replayed(named: Any, count: int, size: int) -> None:
    inner, outer, replayed = named
    logits = outer.forward(build_batch([row(100 + k) for k in range(count)]), ())
    assert replayed == [size]
    assert logits[:, 0].tolist() == [100 + k for k in range(count)]
    [batch] = inner.seen
    assert batch.positions.tolist() == [4] * count + [-1] * (size - count)
    assert batch.context_lens.tolist() == [5] * count + [0] * (size - count)
    assert batch.block_tables.shape == (size, 8)
    assert batch.block_tables[:count, :2].tolist() == [[0, 1]] * count


@pytest.mark.parametrize(
    "rows",
    [
        [row(1, count=2)],
        [row(1), row(2, count=5)],
        [row(1)] * 12,
        [row(1, pages=9)],
        [row(1, samples=False)],
    ],
    ids=["prompt", "mixed", "more than the largest", "longer than the longest", "nothing drawn"],
)
def test_everything_else_runs_eagerly_and_unpadded(named: Any, rows: list[Row]) -> None:
    inner, outer, replayed = named
    batch = build_batch(rows)
    outer.forward(batch, ())
    assert replayed == []
    [seen] = inner.seen
    assert same(seen, batch)


def test_a_row_of_the_step_before_is_padding_now(named: Any) -> None:
    inner, outer, replayed = named
    for count in (4, 3):
        outer.forward(build_batch([row(1)] * count), ())
    assert replayed == [4, 4]
    assert inner.seen[-1].positions.tolist() == [4, 4, 4, -1]
    assert inner.seen[-1].context_lens.tolist() == [5, 5, 5, 0]


def test_rows_that_draw_nothing_have_no_logits(named: Any) -> None:
    _, outer, replayed = named
    rows = [row(7, samples=False), row(8), row(9, samples=False), row(10), row(11)]
    assert outer.forward(build_batch(rows), ())[:, 0].tolist() == [8, 10, 11]
    assert replayed == [8]


def test_it_says_of_itself_what_the_model_says(named: Any) -> None:
    inner, outer, _ = named
    for name in ("identity", "vocab_size", "max_model_len", "eos_token_ids"):
        assert getattr(outer, name) == getattr(inner, name)
    assert outer.components(16) == ("what it has",)


def test_sizes_double_up_to_the_most_rows() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(2) == (1, 2)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 32, 64)
    assert graph_sizes(100) == (1, 2, 4, 8, 16, 32, 64, 100)


def same(a: Batch, b: Batch) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in Batch.__slots__]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def test_batches_of_any_shape_arrive_as_they_were() -> None:
    dice, upload, buffers = random.Random(2), Upload(CPU), StepBuffers()
    for _ in range(200):
        rows = []
        for number in range(dice.choice((1, 2, 5, 40))):
            tokens = tuple(dice.randrange(1 << 17) for _ in range(dice.choice((1, 1, 3, 300))))
            pages = tuple(dice.sample(range(5000), dice.choice((0, 1, 9, 70))))
            drawn = (_SAMPLE,) * dice.randrange(2)
            rows.append(Row(TicketKey(1, 1), 0, tokens, dice.randrange(900), pages, number, drawn))
        batch = buffers.fill(rows)
        arrived = upload(batch)
        assert same(arrived, batch)
        assert arrived.block_tables.is_contiguous()
        buffers.fill(decode_rows(dice, 3))  # the step's own memory is used again; what arrived is not
        assert same(arrived, build_batch(rows))


class Paged(Named):
    """With state, so that a pool can be made for it."""

    def components(self, page_tokens: int) -> Any:
        return (StateComponent("kv", IndexKind.PAGE, page_tokens, (1,), (2,), "float32", (0,)),)


@pytest.mark.parametrize(
    ("sizes", "num_tokens"),
    [
        ({"max_step_tokens": 40}, 40),
        ({"max_step_tokens": 512}, MAX_LEN),
        ({"max_step_tokens": 512, "max_model_len": 50}, 50),
        ({"max_step_tokens": 512, "num_pages": 5}, 20),
        ({"mode": "chunked", "step_tokens": 24, "max_step_tokens": 512}, 24),
        ({"mode": "colocated", "max_step_tokens": 40, "max_model_len": 60}, 60),
    ],
)
def test_the_largest_step_is_rehearsed_beside_what_was_recorded(sizes: dict[str, Any], num_tokens: int) -> None:
    """Recording gives memory back that a rehearsal before it has shown to be there."""
    settings = EngineSettings(**({"page_tokens": PAGE_TOKENS, "num_pages": 100, "max_running": 6} | sizes))
    inner, recorded = Paged(), list[int]()
    placed, pool = on_device(inner, settings, CPU, recorder(recorded, []))
    assert isinstance(pool, StagedPool)
    assert recorded == [6, 4, 2, 1]
    *_, prompt = inner.seen
    assert prompt.positions.tolist() == list(range(num_tokens))
    assert prompt.block_tables.tolist() == [list(range(-(-num_tokens // PAGE_TOKENS)))]
    assert prompt.logit_rows.tolist() == [num_tokens - 1]
    inner.seen.clear()
    assert placed.forward(build_batch([row(5), row(6), row(7)]), pool.tensors)[:, 0].tolist() == [5, 6, 7]
    assert len(inner.seen[0].tokens) == 4
    pool.close()


def test_without_graphs_every_step_is_eager() -> None:
    inner = Paged()
    settings = EngineSettings(page_tokens=PAGE_TOKENS, num_pages=100, max_running=6)
    placed, pool = on_device(inner, settings, CPU, None)
    placed.forward(build_batch([row(5), row(6), row(7)]), pool.tensors)
    assert [len(batch.tokens) for batch in inner.seen] == [MAX_LEN, 3]
    pool.close()


def test_too_little_memory_names_the_setting() -> None:
    class Large(Paged):
        def forward(
            self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
        ) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    settings = EngineSettings(page_tokens=PAGE_TOKENS, num_pages=100)
    with pytest.raises(ConfigError, match=r"kv_bytes: a pool of .* do not fit into the GPU beside the model; lower"):
        on_device(Large(), settings, CPU, None)


def test_a_cpu_is_given_the_model_as_it_is() -> None:
    inner = Paged()
    placed, pool = place(inner, EngineSettings(num_pages=4), "cpu", graphs=True)
    assert placed is inner
    assert type(pool) is StatePool
    assert inner.seen == []
    pool.close()
