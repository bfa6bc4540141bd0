"""Whatever the chunks, pages, batches and workers: the tokens are those of an undivided run without any engine."""

import asyncio
from collections.abc import Callable
from functools import cache
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.api import ChunkDone
from shared.protocol.messages import FirstToken, SamplingSpec
from shared.runtime.mode import Mode
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, deliver, first_tokens, running, undivided

KEY = TicketKey(1, 1)


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((k * 7 + salt * 31 + k * k) % 251 for k in range(length))


def spec(salt: int = 0, n: int = 1, max_tokens: int = 12, temperature: float = 1.0) -> SamplingSpec:
    return SamplingSpec(seed=salt, n=n, max_tokens=max_tokens, temperature=temperature, ignore_eos=True)


@cache
def alone(length: int, salt: int = 0, n: int = 1) -> list[list[int]]:
    return undivided(prompt_of(length, salt), spec(salt, n))


@settings(max_examples=25)
@given(
    page_tokens=st.sampled_from([1, 3, 4, 16]),
    prefill_chunk=st.sampled_from([1, 4, 7, 32]),
    max_step_tokens=st.sampled_from([1, 16, 64]),
    mode=st.sampled_from(get_args(Mode)),
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_load_layout_and_mode_do_not_change_tokens(
    page_tokens: int, prefill_chunk: int, max_step_tokens: int, mode: Mode, requests: list[tuple[int, int]]
) -> None:
    async def run() -> list[list[list[int]]]:
        async with (
            running(
                num_pages=1024,
                page_tokens=page_tokens,
                prefill_chunk=prefill_chunk,
                max_step_tokens=max_step_tokens,
                mode=mode,
                step_tokens=max(12, max_step_tokens),
                max_running=12,
            ) as bench,
            asyncio.TaskGroup() as tasks,
        ):
            runs = [
                tasks.create_task(bench.local(TicketKey(k, 1), prompt_of(length, k), spec(k, n)))
                for k, (length, n) in enumerate(requests, 1)
            ]
        assert bench.is_empty()
        return [task.result() for task in runs]

    assert asyncio.run(run()) == [alone(length, k, n) for k, (length, n) in enumerate(requests, 1)]


async def handed_over(
    length: int,
    n: int = 1,
    *,
    prefill_chunk: int = 8,
    spoil: Callable[[EngineBench, list[FirstToken]], None] = lambda bench, first: None,
) -> list[list[int]]:
    """P computes the prompt, the pieces' bytes go to D, D goes on; all tokens of each choice."""
    prompt, sampling = prompt_of(length), spec(0, n)
    async with running(prefill_chunk=prefill_chunk) as p, running() as d:
        # Others' pages and slots lie around, so that the two sides' numbers differ.
        d.engine.reserve(TicketKey(99, 1), prompt_of(9), spec(), decodes=True)
        d.engine.reserve(KEY, prompt, sampling, decodes=True)
        chunks = await p.prefill(KEY, prompt, sampling)
        deliver(p, d, KEY, chunks)
        first = list(first_tokens(chunks))
        spoil(d, first)
        d.engine.start_prefilled(KEY, tuple(first))
        await d.finish(KEY, n)
        await p.engine.retire(KEY)
        assert p.is_empty()
        return [[token.token, *d.text_of(KEY, token.choice)] for token in first]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33])
async def test_two_engines_equal_one(length: int) -> None:
    assert await handed_over(length, n=3) == alone(length, n=3)


@pytest.mark.parametrize("component", [0, 1, 2])
@pytest.mark.parametrize("length", [5, 8, 30])
async def test_a_lost_component_changes_the_tokens(length: int, component: int) -> None:
    def lose(bench: EngineBench, first: list[FirstToken]) -> None:
        for unit in bench.engine.unit_tables(KEY)[component]:
            bench.pool.tensors[component][:, unit] = 0

    assert await handed_over(length, spoil=lose) != alone(length)


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("length", [5, 8, 30])
async def test_the_handoff_token_stands_at_exactly_the_prompt_length(length: int, shift: int) -> None:
    def misplace(bench: EngineBench, first: list[FirstToken]) -> None:
        [group] = [g for key, g in bench.engine._scheduler.groups.items() if key == KEY]
        group.prompt = group.trunk = (*group.prompt, 0) if shift > 0 else group.prompt[:-1]

    assert await handed_over(length, spoil=misplace) != alone(length)


async def test_a_handoff_token_that_ends_its_choice_is_never_decoded() -> None:
    def end_second(bench: EngineBench, first: list[FirstToken]) -> None:
        first[1] = first[1].model_copy(update={"finish": "stop"})

    async with running() as p, running() as d:
        prompt, sampling = prompt_of(10), spec(0, 3)
        d.engine.reserve(KEY, prompt, sampling, decodes=True)
        chunks = await p.prefill(KEY, prompt, sampling)
        deliver(p, d, KEY, chunks)
        first = list(first_tokens(chunks))
        end_second(d, first)
        d.engine.start_prefilled(KEY, tuple(first))
        await d.finish(KEY, 2)
        assert d.text_of(KEY, 1) == []
        expected = alone(10, n=3)
        assert [d.text_of(KEY, 0), d.text_of(KEY, 2)] == [expected[0][1:], expected[2][1:]]
        await d.engine.retire(KEY)
        assert d.is_empty()


@settings(max_examples=40)
@given(length=st.integers(1, 50), chunk=st.integers(1, 20), page_tokens=st.integers(1, 9))
def test_each_unit_leaves_exactly_once(length: int, chunk: int, page_tokens: int) -> None:
    async def run() -> tuple[list[ChunkDone], EngineBench]:
        async with running(page_tokens=page_tokens, prefill_chunk=chunk) as bench:
            return await bench.prefill(KEY, prompt_of(length), spec()), bench

    chunks, bench = asyncio.run(run())
    assert [(c.start, c.end) for c in chunks] == [(a, min(a + chunk, length)) for a in range(0, length, chunk)]
    for index, component in enumerate(bench.engine.layout.components):
        pieces = [piece for c in chunks for piece in c.pieces if piece.component == index]
        logical = [piece.first_unit + k for piece in pieces for k in range(len(piece.units))]
        assert logical == list(range(component.num_units(length)))
        assert pieces[-1].rows_in_last == component.rows_in_last_unit(length)
        assert all(piece.rows_in_last == component.unit_tokens for piece in pieces[:-1])
    for done in chunks[:-1]:
        assert all(p.component == 0 and (p.first_unit + len(p.units)) * page_tokens <= done.end for p in done.pieces)
