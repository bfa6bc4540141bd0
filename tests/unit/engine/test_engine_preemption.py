"""A pool that is too small for everybody: who gives way, who comes back, and that no token changes by it."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.protocol.messages import FinishReason, SamplingSpec
from shared.runtime.errors import InvalidRequest, PoolExhausted
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, deliver, first_tokens, running, undivided


def prompt_of(length: int, salt: int) -> tuple[int, ...]:
    return tuple((k * 5 + salt * 17) % 251 for k in range(length))


def spec(salt: int, n: int = 1, max_tokens: int = 30) -> SamplingSpec:
    return SamplingSpec(seed=salt, n=n, max_tokens=max_tokens, ignore_eos=True)


def start(bench: EngineBench, key: TicketKey, prompt: tuple[int, ...], sampling: SamplingSpec) -> None:
    bench.engine.reserve(key, prompt, sampling, decodes=True)
    bench.engine.start_local(key)


async def test_the_youngest_gives_way_and_comes_back_with_the_same_tokens() -> None:
    old, young = TicketKey(1, 1), TicketKey(2, 1)
    async with running(num_pages=14, page_tokens=4, growth_tokens=4) as bench:
        start(bench, old, prompt_of(13, 1), spec(1))
        start(bench, young, prompt_of(10, 2), spec(2))
        await bench.finish(old)
        assert bench.engine.stats.preemptions > 0
        assert {key for output in bench.outputs for key in output.preempted} == {young}
        await bench.engine.retire(old)
        await bench.finish(young)
        assert bench.text_of(old) == undivided(prompt_of(13, 1), spec(1))[0]
        assert bench.text_of(young) == undivided(prompt_of(10, 2), spec(2))[0]
        told = [kind for o in bench.outputs for kind in ["out"] * len(o.preempted) + ["in"] * len(o.resumed)]
        assert told == ["out", "in"] * (len(told) // 2)
        await bench.engine.retire(young)
        assert bench.is_empty()


async def test_a_prefilled_request_is_recomputed_from_its_ids() -> None:
    """After preemption the bytes that came from P are gone: D computes the prompt and the tokens so far again."""
    old, young = TicketKey(1, 1), TicketKey(2, 1)
    prompt, sampling = prompt_of(11, 2), spec(2, n=2)
    async with running() as p, running(num_pages=18, page_tokens=4, growth_tokens=4, prefill_chunk=4) as d:
        start(d, old, prompt_of(13, 1), spec(1, max_tokens=50))
        d.engine.reserve(young, prompt, sampling, decodes=True)
        chunks = await p.prefill(young, prompt, sampling)
        deliver(p, d, young, chunks)
        d.engine.start_prefilled(young, first_tokens(chunks))
        await d.finish(old)
        await d.engine.retire(old)
        await d.finish(young, 2)
        assert d.engine.stats.preemptions > 0
        expected = undivided(prompt, sampling)
        assert [d.text_of(young, 0), d.text_of(young, 1)] == [tokens[1:] for tokens in expected]
        await d.engine.retire(young)
        assert d.is_empty()


@settings(max_examples=15)
@given(
    num_pages=st.integers(16, 30),
    growth_tokens=st.sampled_from([1, 3, 16]),
    prefill_chunk=st.sampled_from([3, 16]),
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 2)), min_size=2, max_size=5),
)
def test_crowding_never_changes_tokens(
    num_pages: int, growth_tokens: int, prefill_chunk: int, requests: list[tuple[int, int]]
) -> None:
    async def admit(bench: EngineBench, number: int, length: int, n: int) -> list[list[int]]:
        key, prompt, sampling = TicketKey(number, 1), prompt_of(length, number), spec(number, n, max_tokens=20)
        while True:
            try:
                start(bench, key, prompt, sampling)
                break
            except PoolExhausted:
                await asyncio.sleep(0)
        await bench.finish(key, n)
        await bench.engine.retire(key)
        return [bench.text_of(key, choice) for choice in range(n)]

    async def run() -> list[list[list[int]]]:
        async with (
            running(
                num_pages=num_pages, page_tokens=4, growth_tokens=growth_tokens, prefill_chunk=prefill_chunk
            ) as bench,
            asyncio.TaskGroup() as tasks,
        ):
            runs = [tasks.create_task(admit(bench, k, *request)) for k, request in enumerate(requests, 1)]
        assert bench.is_empty()
        return [task.result() for task in runs]

    assert asyncio.run(run()) == [
        undivided(prompt_of(length, k), spec(k, n, max_tokens=20)) for k, (length, n) in enumerate(requests, 1)
    ]


async def test_nobody_new_gets_in_while_someone_waits_to_come_back() -> None:
    old, young = TicketKey(1, 1), TicketKey(2, 1)
    async with running(num_pages=14, page_tokens=4, growth_tokens=4) as bench:
        start(bench, old, prompt_of(13, 1), spec(1))
        start(bench, young, prompt_of(10, 2), spec(2))
        await bench.until(lambda: bench.engine.stats.preemptions > 0)
        assert bench.engine.queues()["preempted"] == 1
        with pytest.raises(PoolExhausted, match="preempted"):
            bench.engine.reserve(TicketKey(3, 1), (1,), spec(3), decodes=True)
        await bench.engine.retire(young)
        assert bench.engine.queues()["preempted"] == 0
        bench.engine.reserve(TicketKey(3, 1), (1,), spec(3, max_tokens=1), decodes=True)


async def test_a_request_that_outgrows_the_whole_pool_fails_and_others_go_on() -> None:
    key = TicketKey(1, 1)
    async with running(num_pages=6, page_tokens=4, growth_tokens=4) as bench:
        start(bench, key, prompt_of(9, 1), spec(1, max_tokens=100))
        await bench.until(lambda: any(output.failed for output in bench.outputs))
        [failure] = [f for output in bench.outputs for f in output.failed]
        assert (failure.key, failure.code) == (key, "pool_exhausted")
        # The last page's end: position 23 has state, and the token drawn there is the last one.
        assert bench.text_of(key) == undivided(prompt_of(9, 1), spec(1, max_tokens=100))[0][: 6 * 4 - 9 + 1]
        assert bench.engine.pages() == (6, 0, 0)
        await bench.engine.retire(key)
        assert bench.is_empty()
        small = spec(2, max_tokens=10)
        assert await bench.local(TicketKey(2, 1), prompt_of(4, 2), small) == undivided(prompt_of(4, 2), small)


async def test_reserved_pages_are_never_taken_away() -> None:
    """A running request that needs a page waits while the rest is promised to one whose state is arriving."""
    old, arriving = TicketKey(1, 1), TicketKey(2, 1)
    async with running(num_pages=10, page_tokens=4, growth_tokens=4) as bench:
        start(bench, old, prompt_of(8, 1), spec(1))
        bench.engine.reserve(arriving, prompt_of(20, 2), spec(2), decodes=True)
        tables = bench.engine.unit_tables(arriving)
        await bench.until(lambda: len(bench.text_of(old)) == 8 + 1)  # 4 pages full, none free
        await asyncio.sleep(0)
        assert bench.engine.unit_tables(arriving) == tables
        assert not any(output.failed or output.preempted for output in bench.outputs)
        assert bench.engine.last_progress_age_s == 0.0
        await bench.engine.retire(arriving)
        await bench.finish(old)
        assert bench.text_of(old) == undivided(prompt_of(8, 1), spec(1))[0]


@pytest.mark.parametrize(
    ("length", "n", "message"),
    [
        (0, 1, "empty"),
        (60, 1, "has 60 tokens.* may have 59"),
        (41, 1, "has 41 tokens.* needs 11 pages of 4 tokens, and this worker has 10"),
        (4, 5, "5 choices are wanted; this worker runs 4"),
    ],
)
async def test_what_can_never_fit_is_an_invalid_request(length: int, n: int, message: str) -> None:
    async with running(num_pages=10, page_tokens=4, max_running=4, max_model_len=60) as bench:
        with pytest.raises(InvalidRequest, match=message):
            bench.engine.reserve(TicketKey(1, 1), prompt_of(length, 1), spec(1, n, max_tokens=2), decodes=True)
        assert bench.is_empty()


async def test_max_tokens_is_cut_to_the_models_length() -> None:
    key = TicketKey(1, 1)
    async with running(max_model_len=20) as bench:
        [tokens] = await bench.local(key, prompt_of(12, 1), spec(1, max_tokens=1000))
        assert len(tokens) == 8
        assert bench.tokens[-1].finish is FinishReason.LENGTH
