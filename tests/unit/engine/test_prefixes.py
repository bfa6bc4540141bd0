"""What earlier requests have computed is found again while it lies in the pool, and by nobody who must not have it."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

from shared.engine.models.base import Model
from shared.engine.models.registry import load_model
from shared.engine.models.toy import Toy
from shared.engine.pool import StatePool
from shared.engine.sharing import Held, Sharing
from shared.engine.weights.catalog import prepare
from shared.protocol.messages import FirstToken, SamplingSpec
from shared.runtime.errors import PoolExhausted
from shared.state.layout import PoolLayout
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, as_sidecars_see_it, deliver, first_tokens, running
from tests.support_tiny_model import tiny_weights, write_hf

BLOCK = 8
SAMPLING = SamplingSpec(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
OURS = Sharing("us")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("tiny")
    write_hf(directory / "model", tiny_weights())
    return load_model(prepare(str(directory / "model"), directory / "cache").directory)


@pytest.fixture
async def bench(model: Model) -> AsyncIterator[EngineBench]:
    async with running(model, block_tokens=BLOCK) as found:
        yield found
        assert found.is_empty()


def prompt_of(length: int, kind: int = 0) -> tuple[int, ...]:
    return tuple((k * 7 + k * k + kind) % 97 for k in range(length))


async def local(bench: EngineBench, number: int, prompt: tuple[int, ...], **more: Any) -> tuple[list[list[int]], int]:
    """The tokens of each choice, and so many positions were held."""
    key, sampling = TicketKey(number, 1), more.pop("sampling", SAMPLING)
    bench.engine.reserve(key, prompt, sampling, decodes=True, **({"sharing": OURS} | more))
    held = bench.engine.held(key).num_tokens
    computed = bench.engine.stats.prompt_tokens_computed
    bench.engine.start_local(key)
    await bench.finish(key, sampling.n)
    assert bench.engine.stats.prompt_tokens_computed - computed == len(prompt) - held
    await bench.engine.retire(key)
    return [bench.text_of(key, choice) for choice in range(sampling.n)], held


async def test_the_same_prompt_again_computes_its_last_block_alone(bench: EngineBench) -> None:
    first, held = await local(bench, 1, prompt_of(30))
    assert held == 0
    again, held = await local(bench, 2, prompt_of(30))
    assert (again, held) == (first, 24)
    assert bench.engine.stats.prompt_tokens_held == 24


@pytest.mark.parametrize(("length", "held"), [(8, 0), (9, 8), (16, 8), (17, 16)])
async def test_the_last_position_is_always_computed(bench: EngineBench, length: int, held: int) -> None:
    first, _ = await local(bench, 1, prompt_of(length))
    assert await local(bench, 2, prompt_of(length)) == (first, held)


async def test_the_answer_is_part_of_the_next_turn(bench: EngineBench, model: Model) -> None:
    """Prompt and answer but for its last token have their state: 10 and 11 positions, and two whole blocks of them."""
    (answer,), _ = await local(bench, 1, prompt_of(10))
    turn = (*prompt_of(10), *answer, *prompt_of(9, kind=5))
    given, held = await local(bench, 2, turn)
    assert held == 16
    async with running(model) as alone:
        assert (await local(alone, 1, turn, sharing=None))[0] == given


async def test_each_choice_can_be_gone_on_with(bench: EngineBench, model: Model) -> None:
    sampling = SAMPLING.model_copy(update={"n": 3})
    answers, _ = await local(bench, 1, prompt_of(10), sampling=sampling)
    assert len(set(map(tuple, answers))) == 3
    async with running(model) as alone:
        for number, answer in enumerate(answers, 2):
            turn = (*prompt_of(10), *answer, 1, 2, 3)
            given, held = await local(bench, number, turn)
            assert held == 16
            assert (await local(alone, number, turn, sharing=None))[0] == given


async def test_whoever_says_another_word_or_none_finds_nothing(bench: EngineBench) -> None:
    await local(bench, 1, prompt_of(30))
    assert (await local(bench, 2, prompt_of(30), sharing=Sharing("them")))[1] == 0
    assert (await local(bench, 3, prompt_of(30), sharing=None))[1] == 0
    assert (await local(bench, 4, prompt_of(30, kind=1)))[1] == 0
    assert (await local(bench, 5, prompt_of(30)))[1] == 24


async def test_state_that_is_not_kept_by_position_is_not_found_again() -> None:
    async with running(Toy(), block_tokens=BLOCK) as bench:
        await local(bench, 1, prompt_of(30))
        assert (await local(bench, 2, prompt_of(30)))[1] == 0


@pytest.mark.parametrize("block_tokens", [None, 6])
async def test_without_whole_blocks_of_pages_nothing_is_found(model: Model, block_tokens: int | None) -> None:
    async with running(model, block_tokens=block_tokens) as bench:
        await local(bench, 1, prompt_of(30))
        assert (await local(bench, 2, prompt_of(30)))[1] == 0


async def test_two_at_once_have_the_same_pages_and_neither_writes_into_them(bench: EngineBench) -> None:
    alone, _ = await local(bench, 1, prompt_of(30))
    one, two = TicketKey(2, 1), TicketKey(3, 1)
    for key in (one, two):
        bench.engine.reserve(key, prompt_of(30), SAMPLING, decodes=True, sharing=OURS)
    tables = [bench.engine.unit_tables(key)[0] for key in (one, two)]
    assert tables[0][:6] == tables[1][:6]
    assert set(tables[0][6:]).isdisjoint(tables[1][6:])
    shared = as_sidecars_see_it(bench.pool)[0][:, list(tables[0][:6])].clone()
    for key in (one, two):
        bench.engine.start_local(key)
    for key in (one, two):
        await bench.finish(key)
    assert torch.equal(as_sidecars_see_it(bench.pool)[0][:, list(tables[0][:6])], shared)
    assert [bench.text_of(one), bench.text_of(two)] == alone * 2
    await bench.engine.retire(one)
    assert bench.engine.pages()[1] < 64
    await bench.engine.retire(two)


async def test_what_was_not_used_for_longest_goes_first_and_the_end_before_the_beginning(model: Model) -> None:
    """16 pages of 4: of the 11 of a prompt of 30 and its answer 10 have a name."""
    async with running(model, num_pages=16, block_tokens=BLOCK) as bench:
        alone, _ = await local(bench, 1, prompt_of(30))
        await local(bench, 2, prompt_of(32, kind=1))  # 11 pages: the six without a name, and five of the others
        assert await local(bench, 3, prompt_of(30)) == (alone, 24 - BLOCK)
        await local(bench, 4, prompt_of(53, kind=2))  # all of them
        assert (await local(bench, 5, prompt_of(30)))[1] == 0
        assert bench.is_empty()


async def test_held_pages_do_not_make_room_where_there_is_none(model: Model) -> None:
    async with running(model, num_pages=16, block_tokens=BLOCK, growth_tokens=1) as bench:
        await local(bench, 1, prompt_of(30))
        bench.engine.reserve(TicketKey(2, 1), prompt_of(36, kind=1), SAMPLING, decodes=True, sharing=OURS)
        with pytest.raises(PoolExhausted):
            bench.engine.reserve(TicketKey(3, 1), prompt_of(30), SAMPLING, decodes=True, sharing=OURS)
        await bench.engine.retire(TicketKey(2, 1))
        assert bench.is_empty()


async def test_who_gives_way_finds_its_own_beginning_again(model: Model) -> None:
    """Nothing is kept in host memory, and what the younger one had computed lies where it was."""
    long = SAMPLING.model_copy(update={"max_tokens": 24})
    async with running(model) as alone:
        whole = (await local(alone, 2, prompt_of(20), sampling=long, sharing=None))[0]
    async with running(model, num_pages=16, growth_tokens=1, block_tokens=BLOCK) as bench:
        for number, length in ((1, 22), (2, 20)):
            bench.engine.reserve(TicketKey(number, 1), prompt_of(length), long, decodes=True, sharing=OURS)
            bench.engine.start_local(TicketKey(number, 1))
        await bench.finish(TicketKey(1, 1))
        await bench.engine.retire(TicketKey(1, 1))
        await bench.finish(TicketKey(2, 1))
        assert bench.engine.stats.preemptions_recomputed > 0
        assert bench.engine.stats.prompt_tokens_held > 0
        assert [bench.text_of(TicketKey(2, 1))] == whole
        await bench.engine.retire(TicketKey(2, 1))
        assert bench.is_empty()


async def prefilled(bench: EngineBench, number: int, prompt: tuple[int, ...], held_len: int = 0) -> list[Any]:
    key = TicketKey(number, 1)
    bench.engine.reserve(key, prompt, SAMPLING, decodes=False, sharing=OURS)
    return [chunk async for chunk in bench.engine.prefill(key, held_len=held_len)]


async def test_prefill_has_the_beginning_at_once_and_sends_it_all_the_same(model: Model, bench: EngineBench) -> None:
    """The second prompt goes on behind the first one's 24 whole positions."""
    await prefilled(bench, 1, prompt_of(30))
    await bench.engine.retire(TicketKey(1, 1))
    computed = bench.engine.stats.prompt_tokens_computed
    prompt = (*prompt_of(30)[:26], *prompt_of(20, kind=3))
    chunks = await prefilled(bench, 2, prompt)
    assert bench.engine.held(TicketKey(2, 1)) == Held(24)
    assert bench.engine.stats.prompt_tokens_computed - computed == len(prompt) - 24
    assert (chunks[0].start, chunks[0].end) == (0, 24)
    async with running(model) as alone, running(model) as decode:
        whole = (await local(alone, 1, prompt, sharing=None))[0]
        decode.engine.reserve(TicketKey(2, 1), prompt, SAMPLING, decodes=True)
        deliver(bench, decode, TicketKey(2, 1), chunks)
        decode.engine.start_prefilled(TicketKey(2, 1), first_tokens(chunks))
        await decode.finish(TicketKey(2, 1))
        assert [[first_tokens(chunks)[0].token, *decode.text_of(TicketKey(2, 1))]] == whole
        await decode.engine.retire(TicketKey(2, 1))
    await bench.engine.retire(TicketKey(2, 1))


async def test_decode_names_what_was_handed_over_once_it_has_used_it(model: Model) -> None:
    """By the way that it came: what lost something on it serves only those that accept it."""
    async with running(model) as source, running(model, block_tokens=BLOCK) as target:
        prompt, key = prompt_of(30), TicketKey(1, 1)
        chunks = await source.prefill(key, prompt, SAMPLING)
        target.engine.reserve(key, prompt, SAMPLING, decodes=True, sharing=OURS)
        deliver(source, target, key, chunks)
        other = TicketKey(2, 1)
        target.engine.reserve(other, prompt, SAMPLING, decodes=True, sharing=OURS)
        assert target.engine.held(other) == Held()
        await target.engine.retire(other)
        target.engine.start_prefilled(key, first_tokens(chunks), "int8")
        await target.finish(key)
        for number, accepts, held in ((3, ("raw",), Held()), (4, ("raw", "int8"), Held(24, "int8"))):
            target.engine.reserve(TicketKey(number, 1), prompt, SAMPLING, decodes=True, sharing=Sharing("us", accepts))
            assert target.engine.held(TicketKey(number, 1)) == held
            await target.engine.retire(TicketKey(number, 1))
        await target.engine.retire(key)
        await source.engine.retire(key)
        assert target.is_empty()


async def test_what_follows_a_lossy_beginning_is_lossy_too(model: Model) -> None:
    async with running(model, block_tokens=BLOCK) as bench:
        lossy, key = Sharing("us", ("raw", "int8")), TicketKey(1, 1)
        bench.engine.reserve(key, prompt_of(30), SAMPLING, decodes=True, sharing=lossy)
        bench.engine.start_prefilled(key, (FirstToken(choice=0, token=5),), "int8")
        await bench.finish(key)
        await bench.engine.retire(key)
        turn = (*prompt_of(30), 5, *prompt_of(20, kind=1))
        assert (await local(bench, 2, turn, sharing=lossy))[1] == 24
        assert (await local(bench, 3, turn))[1] == 0
        assert (await local(bench, 4, turn, sharing=Sharing("us", ("int8",))))[1] == 48
        assert bench.is_empty()


async def test_what_a_link_brought_goes_on_behind_what_was_held(model: Model, bench: EngineBench) -> None:
    """D has one block, a link brings two more, and the rest is computed."""
    prompt, key = prompt_of(30), TicketKey(2, 1)
    await local(bench, 1, prompt[:10])
    async with running(model) as source:
        whole = (await local(source, 1, prompt, sharing=None))[0]
        await source.prefill(key, prompt, SAMPLING)
        bench.engine.reserve(key, prompt, SAMPLING, decodes=True, sharing=OURS)
        assert bench.engine.held(key) == Held(8)
        theirs, ours = source.engine.unit_tables(key)[0], bench.engine.unit_tables(key)[0]
        for there, here in zip(theirs[2:6], ours[2:6], strict=True):
            as_sidecars_see_it(bench.pool)[0][:, here] = as_sidecars_see_it(source.pool)[0][:, there]
        computed = bench.engine.stats.prompt_tokens_computed
        bench.engine.start_local(key, 24)
        await bench.finish(key)
        assert bench.engine.stats.prompt_tokens_computed - computed == 6
        assert [bench.text_of(key)] == whole
        await bench.engine.retire(key)
        await source.engine.retire(key)


class Watched(StatePool):
    """Remembers which pages were brought in from a link."""

    def __init__(self, layout: PoolLayout) -> None:
        super().__init__(layout)
        self.brought: list[int] = []

    def bring_in(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        self.brought += pages


@pytest.mark.parametrize("handed_over", [True, False])
async def test_only_what_a_link_brought_is_brought_in(model: Model, handed_over: bool) -> None:
    """On a device what a link put into host memory is copied to where the model computes: over a held page it would
    put whatever came there last."""
    async with running(model, block_tokens=BLOCK, make_pool=Watched) as bench:
        await local(bench, 1, prompt_of(10))
        key, pool = TicketKey(2, 1), bench.pool
        assert isinstance(pool, Watched)
        bench.engine.reserve(key, prompt_of(30), SAMPLING, decodes=True, sharing=OURS)
        pages = bench.engine.unit_tables(key)[0]
        if handed_over:
            bench.engine.start_prefilled(key, (FirstToken(choice=0, token=5),))
        else:
            bench.engine.start_local(key, 24)
        await bench.finish(key)
        assert pool.brought == list(pages[2:8] if handed_over else pages[2:6])
        await bench.engine.retire(key)
