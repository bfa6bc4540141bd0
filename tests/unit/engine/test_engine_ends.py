"""How choices come to their end: by a token, by their length, because they are stopped, or because the ticket goes."""

import asyncio
from random import Random

import pytest

from shared.engine.models.toy import EOS_TOKEN
from shared.protocol.messages import FinishReason, FirstToken, SamplingSpec
from shared.runtime.errors import PoolExhausted
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, running, undivided

KEY, OTHER = TicketKey(1, 1), TicketKey(2, 1)
PROMPT = tuple(range(30, 51))
GREEDY = SamplingSpec(temperature=0.0, max_tokens=20, ignore_eos=True)


def start(bench: EngineBench, key: TicketKey, sampling: SamplingSpec = GREEDY) -> None:
    bench.engine.reserve(key, PROMPT, sampling, decodes=True)
    bench.engine.start_local(key)


async def test_a_choice_that_was_stopped_is_silent_and_gives_its_pages_back() -> None:
    sampling = GREEDY.model_copy(update={"n": 3, "temperature": 1.0})
    async with running() as bench:
        start(bench, KEY, sampling)
        await bench.until(lambda: len(bench.tokens) >= 9)
        before = bench.engine.pages()[1]
        bench.engine.finish_choice(KEY, 1)
        told = len(bench.text_of(KEY, 1))
        await bench.finish(KEY, 2)
        assert len(bench.text_of(KEY, 1)) == told
        assert bench.engine.pages()[1] > before
        expected = undivided(PROMPT, sampling)
        assert [bench.text_of(KEY, 0), bench.text_of(KEY, 2)] == [expected[0], expected[2]]
        await bench.engine.retire(KEY)
        assert bench.is_empty()


@pytest.mark.parametrize("which", ["eos", "stop_token", "length"])
async def test_finish_reasons(which: str) -> None:
    """P and D end a choice at the same tokens for the same reasons."""
    free = SamplingSpec(temperature=0.0, max_tokens=300, ignore_eos=True)
    [tokens] = undivided(PROMPT, free)
    if which == "eos":
        assert EOS_TOKEN in tokens
        sampling, end = free.model_copy(update={"ignore_eos": False}), tokens.index(EOS_TOKEN) + 1
    elif which == "stop_token":
        sampling, end = free.model_copy(update={"stop_token_ids": (tokens[0],)}), 1
    else:
        sampling, end = free.model_copy(update={"max_tokens": 1}), 1
    reason = FinishReason.LENGTH if which == "length" else FinishReason.STOP
    async with running(num_pages=200) as bench:
        assert await bench.local(KEY, PROMPT, sampling) == [tokens[:end]]
        assert bench.tokens[-1].finish is reason
        chunks = await bench.prefill(OTHER, PROMPT, sampling)
        expected = FirstToken(choice=0, token=tokens[0], finish=reason if end == 1 else None)
        assert chunks[-1].first == (expected,)


async def test_min_tokens_keeps_the_end_away() -> None:
    free = SamplingSpec(temperature=0.0, max_tokens=30, ignore_eos=True)
    [tokens] = undivided(PROMPT, free)
    sampling = free.model_copy(update={"stop_token_ids": (tokens[0],), "min_tokens": 5})
    async with running() as bench:
        [ended] = await bench.local(KEY, PROMPT, sampling)
        assert len(ended) >= 5
        assert tokens[0] not in ended[:5]


@pytest.mark.parametrize("seed", range(8))
async def test_random_ends_leave_nothing_behind(seed: int) -> None:
    """Tickets start, lose choices and are retired at any moment, in a pool that is too small for all of them."""
    dice = Random(seed)
    async with running(num_pages=24, max_running=8, growth_tokens=4, prefill_chunk=5) as bench:

        async def one(number: int) -> None:
            key, n = TicketKey(number, 1), dice.randint(1, 3)
            sampling = SamplingSpec(seed=number, n=n, max_tokens=dice.randint(1, 25))
            prompt = tuple(dice.randrange(255) for _ in range(dice.randint(1, 30)))
            decodes = dice.random() < 0.7
            try:
                bench.engine.reserve(key, prompt, sampling, decodes=decodes)
            except PoolExhausted:
                return
            try:
                if not decodes:
                    chunks = bench.engine.prefill(key)
                    async for _ in chunks:
                        if dice.random() < 0.2:
                            break
                elif dice.random() < 0.8:
                    bench.engine.start_local(key)
                for _ in range(dice.randint(0, 40)):
                    await asyncio.sleep(0)
                    if decodes and dice.random() < 0.1:
                        bench.engine.finish_choice(key, dice.randrange(n))
            finally:
                await bench.engine.retire(key)
            count = len(bench.tokens)
            await asyncio.sleep(0)
            assert not any(out.key == key for out in bench.tokens[count:])

        for batch in range(6):
            async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                for number in range(10):
                    tasks.create_task(one(batch * 100 + number + 1))
        assert bench.is_empty()
        assert not any(bench.engine.queues().values())
