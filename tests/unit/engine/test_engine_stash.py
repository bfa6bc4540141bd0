"""Who gives way keeps its state in host memory: it comes back as it was, computes nothing again and leaves nothing."""

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.executor import InlineExecutor
from shared.engine.models.base import Batch
from shared.engine.models.toy import Toy
from shared.engine.watch import LayerDone
from shared.protocol.messages import SamplingSpec
from shared.runtime.errors import PoolExhausted
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, deliver, first_tokens, running, undivided

T = TypeVar("T")
OLD, YOUNG = TicketKey(1, 1), TicketKey(2, 1)
PLENTY = 1 << 20
PAGE_BYTES, SLOT_BYTES = 2 * 2 * 4 * 4 * 4, 2 * 4 * 4 + 2 * 8 * 4 * 4  # the toy model's, pages of four tokens


def prompt_of(length: int, salt: int) -> tuple[int, ...]:
    return tuple((k * 5 + salt * 17) % 251 for k in range(length))


def spec(salt: int, **sampling: object) -> SamplingSpec:
    return SamplingSpec(**({"seed": salt, "max_tokens": 30, "ignore_eos": True} | sampling))  # type: ignore[arg-type]


def start(bench: EngineBench, key: TicketKey, prompt: tuple[int, ...], sampling: SamplingSpec) -> None:
    bench.engine.reserve(key, prompt, sampling, decodes=True)
    bench.engine.start_local(key)


def is_as_at_the_start(bench: EngineBench) -> bool:
    return bench.is_empty() and bench.engine.stashed_bytes == 0


KINDS = {
    "greedy": spec(2, temperature=0.0),
    "seeded": spec(2, temperature=0.9, top_p=0.9),
    "penalties": spec(2, temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3),
    "logprobs": spec(2, logprobs=4),
    "three": spec(2, n=3, temperature=0.8, frequency_penalty=0.7, logprobs=1),
}


@pytest.mark.parametrize("stash_bytes", [0, PLENTY], ids=["recompute", "stash"])
@pytest.mark.parametrize("kind", list(KINDS))
async def test_who_gave_way_goes_on_with_the_same_tokens_and_logprobs(kind: str, stash_bytes: int) -> None:
    prompt, sampling = prompt_of(10, 2), KINDS[kind]
    sizes = {"page_tokens": 4, "growth_tokens": 4, "prefill_chunk": 5}
    async with running(**sizes) as alone:
        start(alone, YOUNG, prompt, sampling)
        await alone.finish(YOUNG, sampling.n)
    num_pages, max_tokens = (14, 30) if sampling.n == 1 else (32, 110)
    async with running(num_pages=num_pages, stash_bytes=stash_bytes, **sizes) as bench:
        start(bench, OLD, prompt_of(13, 1), spec(1, max_tokens=max_tokens))
        start(bench, YOUNG, prompt, sampling)
        await bench.finish(OLD)
        await bench.engine.retire(OLD)
        await bench.finish(YOUNG, sampling.n)
        stats = bench.engine.stats
        assert stats.preemptions > 0
        assert (stats.preemptions_stashed, stats.preemptions_recomputed) == (
            (stats.preemptions, 0) if stash_bytes else (0, stats.preemptions)
        )
        for choice in range(sampling.n):
            mine, expected = (
                [(t.index, t.token, t.finish) for t in b.tokens if (t.key, t.choice) == (YOUNG, choice)]
                for b in (bench, alone)
            )
            assert mine == expected
            for ours, theirs in zip(logprobs_of(bench, choice), logprobs_of(alone, choice), strict=True):
                assert ours[0] == theirs[0]
                assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(ours[1], theirs[1], strict=True))
        computed_twice = stats.prompt_tokens_computed - len(prompt) - 13
        assert (computed_twice > 0) is not bool(stash_bytes)
        assert (stats.tokens_dropped > 0) is not bool(stash_bytes)
        await bench.engine.retire(YOUNG)
        assert is_as_at_the_start(bench)


def logprobs_of(bench: EngineBench, choice: int) -> list[tuple[list[int], list[float]]]:
    found = [t.logprob for t in bench.tokens if (t.key, t.choice) == (YOUNG, choice) and t.logprob is not None]
    return [([token for token, _ in p.top], [p.logprob, *(value for _, value in p.top)]) for p in found]


async def test_bytes_that_came_from_prefill_come_back_as_they_were() -> None:
    """Nothing is computed again on D, not even the prompt; the choices share the prompt's full pages as before."""
    prompt, sampling = prompt_of(11, 2), spec(2, n=3)
    async with running() as p, running(num_pages=32, growth_tokens=4, stash_bytes=PLENTY) as d:
        start(d, OLD, prompt_of(13, 1), spec(1, max_tokens=110))
        d.engine.reserve(YOUNG, prompt, sampling, decodes=True)
        chunks = await p.prefill(YOUNG, prompt, sampling)
        deliver(p, d, YOUNG, chunks)
        d.engine.start_prefilled(YOUNG, first_tokens(chunks))
        group = d.engine._scheduler.groups[YOUNG]
        await d.until(lambda: any(YOUNG in output.preempted for output in d.outputs))
        assert group.saved is not None
        own = [place.pages[2:] for place in group.saved.places]
        assert [place.pages[:2] for place in group.saved.places] == [(0, 1)] * 3
        assert d.engine.stashed_bytes == 3 * SLOT_BYTES + (2 + sum(map(len, own))) * PAGE_BYTES
        await asyncio.sleep(0)
        assert sum(t.numel() * t.element_size() for t in group.saved.tensors) == d.engine.stashed_bytes
        await d.finish(OLD)
        await d.engine.retire(OLD)
        await d.until(lambda: any(YOUNG in output.resumed for output in d.outputs))
        shared = {page for choice in group.live for page in choice.pages[:2]}
        assert len(shared) == 2
        assert all(d.engine._capacity.pages.num_references(page) == len(group.live) for page in shared)
        await d.finish(YOUNG, 3)
        assert d.engine.stats.prompt_tokens_computed == 13
        expected = undivided(prompt, sampling)
        assert [d.text_of(YOUNG, c) for c in range(3)] == [tokens[1:] for tokens in expected]
        await d.engine.retire(YOUNG)
        assert is_as_at_the_start(d)


class Watching(InlineExecutor):
    """Looks at the engine at the beginning and at the end of each step."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    async def run(self, work: Callable[[], T]) -> T:
        self._look()
        try:
            return await super().run(work)
        finally:
            self._look()


async def test_pages_are_free_only_when_the_step_that_copies_them_is_over() -> None:
    seen: list[tuple[int, int]] = []
    bench: EngineBench

    def look() -> None:
        group = bench.engine._scheduler.groups.get(YOUNG)
        if group is not None and group.gave_way:
            used = bench.engine.stashed_bytes
            seen.append((bench.engine._capacity.pages.held_by(YOUNG), used))

    async with running(Toy(), Watching(look), num_pages=14, growth_tokens=4, stash_bytes=PLENTY) as bench:
        start(bench, OLD, prompt_of(13, 1), spec(1))
        start(bench, YOUNG, prompt_of(10, 2), spec(2))
        await bench.until(lambda: len(seen) > 4)
        assert [held > 0 for held, _ in seen[:3]] == [True, True, False]
        assert len({used for _, used in seen[:4]}) == 1
        await bench.finish(OLD)
        await bench.engine.retire(OLD)
        await bench.finish(YOUNG)


async def test_what_finds_no_room_in_the_stash_is_computed_again() -> None:
    """Room for one of two: the other is recomputed, and both give the same tokens as ever."""
    third = TicketKey(3, 1)
    one = 5 * PAGE_BYTES + SLOT_BYTES
    async with running(num_pages=17, growth_tokens=2, stash_bytes=one) as bench:
        start(bench, OLD, prompt_of(13, 1), spec(1, max_tokens=50))
        start(bench, YOUNG, prompt_of(10, 2), spec(2))
        start(bench, third, prompt_of(10, 3), spec(3))
        most = 0

        def done() -> bool:
            nonlocal most
            most = max(most, bench.engine.stashed_bytes)
            return bench.is_finished(OLD)

        await bench.until(done)
        await bench.engine.retire(OLD)
        await bench.finish(YOUNG)
        await bench.engine.retire(YOUNG)
        await bench.finish(third)
        stats = bench.engine.stats
        assert stats.preemptions_stashed > 0
        assert stats.preemptions_recomputed > 0
        assert 0 < most <= one
        assert bench.text_of(YOUNG) == undivided(prompt_of(10, 2), spec(2))[0]
        assert bench.text_of(third) == undivided(prompt_of(10, 3), spec(3))[0]
        await bench.engine.retire(third)
        assert is_as_at_the_start(bench)


@pytest.mark.parametrize("moment", ["copying", "away", "coming back"])
async def test_retired_while_preempted_frees_pages_and_host_memory(moment: str) -> None:
    """Within the step under way, if there is one."""
    bench: EngineBench
    retiring: list[asyncio.Task[None]] = []

    async def retire() -> None:
        began = bench.engine.stats.steps
        await bench.engine.retire(YOUNG)
        assert bench.engine.stats.steps <= began + 1
        assert (bench.engine.stashed_bytes, bench.engine._capacity.pages.held_by(YOUNG)) == (0, 0)

    def look() -> None:
        group = bench.engine._scheduler.groups.get(YOUNG)
        if group is None or retiring:
            return
        copying, away = group.gave_way and group.in_step, group.gave_way and not group.in_step
        if {"copying": copying, "away": away, "coming back": group.loading}[moment]:
            assert bench.engine.stashed_bytes > 0
            retiring.append(asyncio.get_running_loop().create_task(retire()))

    async with running(Toy(), Watching(look), num_pages=14, growth_tokens=4, stash_bytes=PLENTY) as bench:
        start(bench, OLD, prompt_of(13, 1), spec(1))
        start(bench, YOUNG, prompt_of(10, 2), spec(2))
        await bench.finish(OLD)
        await bench.engine.retire(OLD)
        await bench.until(lambda: bool(retiring))
        await retiring[0]
        assert is_as_at_the_start(bench)


async def test_a_choice_that_is_stopped_while_away_does_not_come_back() -> None:
    prompt, sampling = prompt_of(10, 2), spec(2, n=3)
    async with running(num_pages=24, growth_tokens=4, stash_bytes=PLENTY) as bench:
        start(bench, OLD, prompt_of(13, 1), spec(1, max_tokens=70))
        start(bench, YOUNG, prompt, sampling)
        await bench.until(lambda: any(YOUNG in output.preempted for output in bench.outputs))
        bench.engine.finish_choice(YOUNG, 0)  # the one that owns the prompt's partial page
        await bench.finish(OLD)
        await bench.engine.retire(OLD)
        await bench.finish(YOUNG, 2)
        expected = undivided(prompt, sampling)
        assert [bench.text_of(YOUNG, c) for c in (1, 2)] == expected[1:]
        await bench.engine.retire(YOUNG)
        assert is_as_at_the_start(bench)


async def test_all_choices_stopped_while_away_leave_nothing() -> None:
    async with running(num_pages=14, growth_tokens=4, stash_bytes=PLENTY) as bench:
        start(bench, OLD, prompt_of(13, 1), spec(1))
        start(bench, YOUNG, prompt_of(10, 2), spec(2))
        await bench.until(lambda: any(YOUNG in output.preempted for output in bench.outputs))
        bench.engine.finish_choice(YOUNG, 0)
        await bench.finish(OLD)
        await bench.engine.retire(OLD)
        await bench.engine.retire(YOUNG)
        assert is_as_at_the_start(bench)


async def test_a_step_that_fails_while_it_copies_leaves_nothing() -> None:
    class FailsWhenAway(Toy):
        def forward(
            self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
        ) -> torch.Tensor:
            if bench.engine._scheduler.groups[YOUNG].gave_way:
                raise RuntimeError("the device fell over")
            return super().forward(batch, state, layer_done)

    bench: EngineBench
    both = OLD, YOUNG, TicketKey(3, 1)
    async with running(FailsWhenAway(), num_pages=19, growth_tokens=4, stash_bytes=PLENTY) as bench:
        for number, key in enumerate(both):  # the third is young too, and runs beside the copying
            start(bench, key, prompt_of(10, number), spec(number, max_tokens=60))
        await bench.until(lambda: any(output.failed for output in bench.outputs))
        for key in both:
            await bench.engine.retire(key)
        assert is_as_at_the_start(bench)


@settings(max_examples=20)
@given(
    num_pages=st.integers(24, 40),
    stash_bytes=st.sampled_from([6 * PAGE_BYTES + SLOT_BYTES, 12 * PAGE_BYTES + 2 * SLOT_BYTES, PLENTY]),
    growth_tokens=st.sampled_from([1, 3, 16]),
    prefill_chunk=st.sampled_from([3, 16]),
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3)), min_size=2, max_size=5),
)
def test_crowding_with_a_stash_never_changes_tokens(
    num_pages: int, stash_bytes: int, growth_tokens: int, prefill_chunk: int, requests: list[tuple[int, int]]
) -> None:
    async def admit(bench: EngineBench, number: int, length: int, n: int) -> list[list[int]]:
        key, prompt, sampling = TicketKey(number, 1), prompt_of(length, number), spec(number, n=n, max_tokens=20)
        while True:
            try:
                start(bench, key, prompt, sampling)
                break
            except PoolExhausted:
                await asyncio.sleep(0)
        await bench.finish(key, n)
        await bench.engine.retire(key)
        assert bench.engine.stashed_bytes <= stash_bytes
        return [bench.text_of(key, choice) for choice in range(n)]

    async def run() -> list[list[list[int]]]:
        sizes = {"page_tokens": 4, "growth_tokens": growth_tokens, "prefill_chunk": prefill_chunk}
        async with (
            running(num_pages=num_pages, stash_bytes=stash_bytes, **sizes) as bench,
            asyncio.TaskGroup() as tasks,
        ):
            runs = [tasks.create_task(admit(bench, k, *request)) for k, request in enumerate(requests, 1)]
        assert is_as_at_the_start(bench)
        return [task.result() for task in runs]

    assert asyncio.run(run()) == [
        undivided(prompt_of(length, k), spec(k, n=n, max_tokens=20)) for k, (length, n) in enumerate(requests, 1)
    ]
