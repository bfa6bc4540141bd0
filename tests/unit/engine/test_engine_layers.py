"""A prompt's state leaves layer by layer: each layer's as soon as it is there and once, and nobody's for nothing."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch

from shared.engine.api import ChunkDone
from shared.engine.executor import ThreadExecutor
from shared.engine.models.base import Batch
from shared.engine.models.toy import Toy
from shared.engine.pieces import chunk_pieces, in_layers
from shared.engine.pool import StatePool
from shared.engine.staged_pool import StagedPool
from shared.engine.watch import LayerDone
from shared.protocol.messages import SamplingSpec
from shared.runtime.overlap import ONE_PIECE_LEN, Cut, Overlap, choose_cut
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.link import Piece, TicketKey
from tests.support_engine import DEADLINE_S, EngineBench, deliver, first_tokens, running, undivided

KEY, OTHER = TicketKey(1, 1), TicketKey(2, 1)
SAMPLING = SamplingSpec(seed=3, n=2, max_tokens=9, ignore_eos=True)
BY_LAYER = Cut(layers=1)


class Gated(Toy):
    """Waits after each layer of a prompt until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = [threading.Semaphore(0), threading.Semaphore(0)]
        self.computed: list[int] = []

    def forward(
        self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
    ) -> torch.Tensor:
        if layer_done is None:
            return super().forward(batch, state)
        told = layer_done

        def held(layer: int) -> None:
            self.computed.append(layer)
            told(layer)
            assert self.gates[layer].acquire(timeout=DEADLINE_S)

        return super().forward(batch, state, held)

    def let_all_go_on(self) -> None:
        for gate in self.gates:
            gate.release(1000)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((k * 7 + k * k) % 251 for k in range(length))


def staged(layout: PoolLayout) -> StatePool:
    return StagedPool(layout, torch.device("cpu"))


async def take(bench: EngineBench, cut: Cut, length: int) -> list[ChunkDone]:
    bench.engine.reserve(KEY, prompt_of(length), SAMPLING, decodes=False)
    async with asyncio.timeout(DEADLINE_S):
        return [chunk async for chunk in bench.engine.prefill(KEY, cut)]


def shape(chunks: list[ChunkDone]) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.end, chunk.partial) for chunk in chunks]


@pytest.mark.parametrize("make_pool", [StatePool, staged])
@pytest.mark.parametrize("cut", [Cut(), BY_LAYER, Cut(layers=2), Cut(layers=5), Cut(by_chunks=False)])
@pytest.mark.parametrize("length", [1, 5, 16, 22])
async def test_every_cut_hands_over_the_same(
    make_pool: Callable[[PoolLayout], StatePool], cut: Cut, length: int
) -> None:
    prompt = prompt_of(length)
    async with running(make_pool=make_pool, prefill_chunk=6) as p, running(make_pool=make_pool) as d:
        chunks = await take(p, cut, length)
        d.engine.reserve(KEY, prompt, SAMPLING, decodes=True)
        deliver(p, d, KEY, chunks)
        d.engine.start_prefilled(KEY, first_tokens(chunks))
        await d.finish(KEY, SAMPLING.n)
        mine = [[first.token, *d.text_of(KEY, first.choice)] for first in first_tokens(chunks)]
        assert mine == undivided(prompt, SAMPLING)
        await p.engine.retire(KEY)
        await d.engine.retire(KEY)
        assert p.is_empty()
        assert d.is_empty()


async def test_parts_come_before_the_chunk_and_what_was_told_is_not_told_again() -> None:
    async with running(prefill_chunk=8) as bench:
        chunks = await take(bench, BY_LAYER, 20)
        part, rest = True, False
        assert shape(chunks) == [
            *((0, 8, part), (0, 8, part), (0, 8, rest)),
            *((8, 16, part), (8, 16, part), (8, 16, rest)),
            *((16, 20, part), (16, 20, part), (16, 20, rest)),
        ]
        assert all(chunk.partial == bool(chunk.pieces) for chunk in chunks)
        layers = {(p.first_layer, p.num_layers) for chunk in chunks for p in chunk.pieces}
        assert layers == {(0, 1), (1, 1)}
        last = [piece.component for piece in chunks[-2].pieces]
        assert last == [0, 1, 2], "request-indexed state leaves with the last chunk"
        await bench.engine.retire(KEY)


@pytest.mark.parametrize("layers", [2, 5])
async def test_the_last_layers_are_told_when_they_are_done_however_few(layers: int) -> None:
    async with running(prefill_chunk=8) as bench:
        chunks = await take(bench, Cut(layers=layers), 7)
        assert shape(chunks) == [(0, 7, True), (0, 7, False)]
        assert [bool(chunk.pieces) for chunk in chunks] == [True, False]
        await bench.engine.retire(KEY)


async def test_parts_do_not_count_as_chunks_that_are_computed_ahead() -> None:
    """Whoever takes parts only has not taken the chunk: P computes no further ahead than by whole chunks."""
    async with running(prefill_chunk=4, prefill_lead=1) as bench, asyncio.timeout(DEADLINE_S):
        bench.engine.reserve(KEY, prompt_of(40), SAMPLING, decodes=False)
        chunks = bench.engine.prefill(KEY, BY_LAYER)
        group = bench.engine._scheduler.groups[KEY]
        for end in (4, 8, 12):
            assert [(await anext(chunks)).partial for _ in range(3)] == [True, True, False]
            for _ in range(20):
                await asyncio.sleep(0)
            assert (group.computed, group.ahead) == (end + 4, 1)
        await chunks.aclose()
        await bench.engine.retire(KEY)


@pytest.mark.parametrize("other", [Cut(), Cut(layers=2), Cut(by_chunks=False)])
async def test_prompts_that_leave_in_other_ways_share_a_step(other: Cut) -> None:
    async with running(make_pool=staged, max_step_tokens=64, prefill_lead=1) as p, running() as d:
        cuts = {KEY: BY_LAYER, OTHER: other}
        for key in cuts:
            p.engine.reserve(key, prompt_of(13), SAMPLING, decodes=False)
            d.engine.reserve(key, prompt_of(13), SAMPLING, decodes=True)

        async def all_of(key: TicketKey) -> list[ChunkDone]:
            return [chunk async for chunk in p.engine.prefill(key, cuts[key])]

        for key, chunks in zip(cuts, await asyncio.gather(*map(all_of, cuts)), strict=True):
            deliver(p, d, key, chunks)
            d.engine.start_prefilled(key, first_tokens(chunks))
            await d.finish(key, SAMPLING.n)
            mine = [[first.token, *d.text_of(key, first.choice)] for first in first_tokens(chunks)]
            assert mine == undivided(prompt_of(13), SAMPLING)
            await d.engine.retire(key)
            await p.engine.retire(key)
        assert p.engine.stats.steps == 1


async def test_one_piece_is_all_at_the_end() -> None:
    async with running(prefill_chunk=4, prefill_lead=1) as bench:
        assert shape(await take(bench, Cut(by_chunks=False), 20)) == [(0, 20, False)]
        await bench.engine.retire(KEY)


@pytest.mark.parametrize("make_pool", [StatePool, staged])
async def test_a_layer_is_told_and_is_there_while_the_next_one_is_computed(
    make_pool: Callable[[PoolLayout], StatePool],
) -> None:
    model = Gated()
    async with running(model, ThreadExecutor(1), make_pool) as bench, asyncio.timeout(DEADLINE_S):
        bench.engine.reserve(KEY, prompt_of(9), SAMPLING, decodes=False)
        chunks = bench.engine.prefill(KEY, BY_LAYER)
        for layer in range(2):
            part = await anext(chunks)
            assert model.computed == list(range(layer + 1))
            assert part.partial
            for piece in part.pieces:
                seen = bench.pool.layout.view(bench.pool.buffer, piece.component)[layer, list(piece.units)]
                computed = bench.pool.tensors[piece.component][layer, list(piece.units)].numpy()
                assert seen.tobytes() == computed.tobytes()
                assert not (seen == 99).all(), "what earlier requests left behind"
            model.gates[layer].release()
        assert (await anext(chunks)).last
        await chunks.aclose()
        await bench.engine.retire(KEY)


async def test_what_nobody_wants_any_more_stops_between_two_layers() -> None:
    model = Gated()
    async with running(model, ThreadExecutor(1)) as bench, asyncio.timeout(DEADLINE_S):
        bench.engine.reserve(KEY, prompt_of(9), SAMPLING, decodes=False)
        chunks = bench.engine.prefill(KEY, BY_LAYER)
        await anext(chunks)
        await chunks.aclose()
        retiring = asyncio.gather(bench.engine.retire(KEY))
        await asyncio.sleep(0)
        assert not retiring.done(), "the step still uses the pages"
        model.let_all_go_on()
        await retiring
        assert bench.is_empty()
        assert bench.engine.stats.steps == 0
        assert bench.engine.stats.prompt_tokens_computed == 0
    # The second layer may have been computed before the step looked up; nothing after it was.
    assert model.computed in ([0], [0, 1])


async def test_a_step_that_somebody_else_needs_goes_on() -> None:
    model = Gated()
    async with running(model, ThreadExecutor(1)) as bench, asyncio.timeout(DEADLINE_S):
        for key in (KEY, OTHER):
            bench.engine.reserve(key, prompt_of(5), SAMPLING, decodes=False)
        first, second = bench.engine.prefill(KEY, BY_LAYER), bench.engine.prefill(OTHER, BY_LAYER)
        taking = asyncio.gather(anext(first), anext(second))
        await taking
        await first.aclose()
        model.let_all_go_on()
        rest = [chunk async for chunk in second]
        assert rest[-1].last
        for key in (KEY, OTHER):
            await bench.engine.retire(key)
        assert bench.is_empty()


async def test_a_model_that_says_nothing_of_its_layers_loses_nothing() -> None:
    class Silent(Toy):
        def forward(
            self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
        ) -> torch.Tensor:
            return super().forward(batch, state)

    async with running(Silent(), make_pool=staged, prefill_chunk=8) as p, running() as d:
        chunks = await take(p, BY_LAYER, 20)
        assert [chunk.partial for chunk in chunks] == [False] * 3
        d.engine.reserve(KEY, prompt_of(20), SAMPLING, decodes=True)
        deliver(p, d, KEY, chunks)
        d.engine.start_prefilled(KEY, first_tokens(chunks))
        await d.finish(KEY, SAMPLING.n)
        await d.engine.retire(KEY)
        await p.engine.retire(KEY)


async def test_what_was_computed_ahead_comes_whole_and_the_rest_by_layers() -> None:
    model = Gated()
    async with running(model, ThreadExecutor(1), prefill_chunk=8) as bench, asyncio.timeout(DEADLINE_S):
        bench.engine.reserve(KEY, prompt_of(20), SAMPLING, decodes=False)
        bench.engine.compute_ahead(KEY, 1)
        for gate in model.gates:
            gate.release()
        while len(model.computed) < 3:  # in the second chunk, whose step began before anybody asked
            await asyncio.sleep(0.001)
        chunks = bench.engine.prefill(KEY, BY_LAYER)
        assert shape([await anext(chunks)]) == [(0, 8, False)]
        model.let_all_go_on()
        rest = [chunk async for chunk in chunks]
        assert shape(rest) == [(8, 16, False), (16, 20, True), (16, 20, True), (16, 20, False)]
        await bench.engine.retire(KEY)


def test_components_that_lack_layers_or_keep_them_in_another_order() -> None:
    layout = PoolLayout(
        (
            StateComponent("all", IndexKind.PAGE, 2, (), (1,), "uint8", (0, 1, 2, 3)),
            StateComponent("odd", IndexKind.PAGE, 2, (), (1,), "uint8", (1, 3)),
            StateComponent("turned", IndexKind.REQUEST, 1, (), (1,), "uint8", (3, 0, 1)),
        ),
        4,
        1,
    )
    assert layout.model_layers == 4
    whole = chunk_pieces(layout, 0, 3, True, (3, 1), 0)
    assert in_layers(layout, whole, range(0, 2)) == (
        Piece(0, 0, (3, 1), 1, 0, 2),
        Piece(1, 0, (3, 1), 1, 0, 1),
        Piece(2, 0, (0,), 1, 1, 2),
    )
    assert in_layers(layout, whole, range(2, 3)) == (Piece(0, 0, (3, 1), 1, 2, 1),)
    assert in_layers(layout, whole, range(3, 4)) == (
        Piece(0, 0, (3, 1), 1, 3, 1),
        Piece(1, 0, (3, 1), 1, 1, 1),
        Piece(2, 0, (0,), 1, 0, 1),
    )
    assert [piece.first_layer for piece in in_layers(layout, whole, range(0, 4))] == [0, 0, 0]
    assert in_layers(layout, whole, range(1, 4, 2))[2:] == (
        Piece(1, 0, (3, 1), 1, 0, 2),
        Piece(2, 0, (0,), 1, 0, 1),
        Piece(2, 0, (0,), 1, 2, 1),
    )


@pytest.mark.parametrize(
    ("overlap", "length", "cut"),
    [
        ("auto", 1, Cut(by_chunks=False)),
        ("auto", ONE_PIECE_LEN, Cut(by_chunks=False)),
        ("auto", ONE_PIECE_LEN + 1, Cut()),
        ("chunks", 1, Cut()),
        ("chunks", 5000, Cut()),
        ("layers", 1, Cut(layers=8)),
        ("layers", 5000, Cut(layers=8)),
    ],
)
def test_the_cut_follows_the_setting_and_auto_the_length(overlap: Overlap, length: int, cut: Cut) -> None:
    assert choose_cut(overlap, 8, length) == cut


def test_layers_do_not_leave_at_the_end_only() -> None:
    with pytest.raises(ValueError, match="chunk by chunk"):
        Cut(by_chunks=False, layers=1)
