"""A request that was cut off goes on on another engine, wherever it was cut and however it samples: the tokens, their
log probabilities and the end are those of the run that nobody interrupted."""

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, get_args

import pytest

from kernels.cpu.ops import warm_up
from shared.engine.api import Past
from shared.engine.executor import ThreadExecutor
from shared.engine.models.registry import load_model
from shared.engine.models.toy import EOS_TOKEN, VOCAB_SIZE
from shared.engine.weights.catalog import prepare
from shared.protocol.messages import FinishReason, SamplingSpec
from shared.runtime.errors import InvalidRequest, PoolExhausted
from shared.runtime.mode import Mode
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, running
from tests.support_resume import (
    Cut,
    Seen,
    cut_somewhere,
    go_on_local,
    go_on_prefilled,
    hand_over,
    some_sampling,
    uninterrupted,
)
from tests.support_tiny_model import VOCAB, tiny_weights, write_hf

OLD, KEY = TicketKey(1, 1), TicketKey(2, 1)
PLENTY = 1 << 20
NUM_MIXES = 24
NEAR_TIE = 0.001
LOGIT_ROUNDING = 5e-4


def prompt_of(length: int, salt: int) -> tuple[int, ...]:
    return tuple((k * 5 + salt * 17 + k * k) % 251 for k in range(length))


async def cut_off(prompt: tuple[int, ...], sampling: SamplingSpec, *at: int) -> Cut:
    """The toy's request, each choice after so many tokens."""
    async with running(num_pages=256) as bench:
        whole = await uninterrupted(bench, KEY, prompt, sampling)
    return Cut(prompt, sampling, tuple(map(tuple, whole)), at)


async def test_nothing_changes_wherever_it_is_cut_and_however_it_samples() -> None:
    """The toy has pages, a slot and a ring, and its logits depend on all of it and on every position."""
    seen: set[tuple[object, ...]] = set()
    for seed in range(NUM_MIXES):
        rng = random.Random(seed)
        prompt, sampling = prompt_of(rng.randint(1, 30), seed), some_sampling(rng, VOCAB_SIZE)
        mode: Mode = rng.choice(get_args(Mode))
        sizes: dict[str, Any] = {"page_tokens": rng.choice((1, 3, 4, 16)), "prefill_chunk": rng.choice((1, 4, 7, 32))}
        sizes |= {"mode": mode, "num_pages": 256, "growth_tokens": rng.choice((1, 5, 64))}
        async with running(**sizes) as alone:
            whole = await uninterrupted(alone, KEY, prompt, sampling)
        for _ in range(2):
            cut = cut_somewhere(prompt, sampling, whole, rng)
            async with running(**sizes) as bench:
                assert await go_on_local(bench, KEY, cut) == cut.rest, f"local, seed {seed}: {cut}"
                assert bench.is_empty()
            async with running(page_tokens=sizes["page_tokens"], num_pages=256) as p, running(**sizes) as d:
                assert await go_on_prefilled(p, d, KEY, cut) == cut.rest, f"handed over, seed {seed}: {cut}"
                assert p.is_empty()
                assert d.is_empty()
                assert d.engine.stats.prompt_tokens_computed == 0
            several = sampling.n > 1
            seen |= {("end", rest[-1][3], several) for rest in cut.rest if rest}
            seen |= {("without a past", any(cut.at)) for c in cut.live if not cut.at[c]}
            seen |= {("over", c in cut.stopped) for c in cut.finished}
    ends = {("end", reason, several) for reason in FinishReason for several in (True, False)}
    assert seen == ends | {("without a past", past) for past in (True, False)} | {("over", x) for x in (True, False)}


@pytest.mark.parametrize(("n", "path"), [(1, "local"), (1, "remote"), (3, "local"), (3, "remote")])
@pytest.mark.parametrize("stash_bytes", [0, PLENTY], ids=["recompute", "stash"])
async def test_one_that_goes_on_here_may_give_way_and_come_back(n: int, path: str, stash_bytes: int) -> None:
    sampling = SamplingSpec(seed=5, n=n, max_tokens=30, temperature=0.8, frequency_penalty=0.7, logprobs=1)
    cut = await cut_off(prompt_of(10, 2), sampling.model_copy(update={"ignore_eos": True}), *(13, 2, 7)[:n])
    long = SamplingSpec(seed=1, max_tokens=20, ignore_eos=True)
    async with (
        running() as p,
        running(
            num_pages={1: 21, 3: 30}[n], page_tokens=4, growth_tokens=4, prefill_chunk=5, stash_bytes=stash_bytes
        ) as d,
    ):
        d.engine.reserve(OLD, prompt_of(40, 1), long, decodes=True)
        d.engine.start_local(OLD)
        async with asyncio.TaskGroup() as tasks:
            going_on = tasks.create_task(
                go_on_local(d, KEY, cut) if path == "local" else go_on_prefilled(p, d, KEY, cut)
            )
            await d.finish(OLD)
            await d.engine.retire(OLD)
        assert going_on.result() == cut.rest
        assert d.engine.stats.preemptions > 0
        assert bool(d.engine.stats.preemptions_stashed) == bool(stash_bytes)
        assert d.is_empty()


async def test_what_is_handed_over_is_not_computed_again() -> None:
    """One choice: D feeds the last token, and each step brings the next one."""
    cut = await cut_off(prompt_of(9, 1), SamplingSpec(max_tokens=20, ignore_eos=True), 12)
    async with running() as p, running() as d:
        assert await go_on_prefilled(p, d, KEY, cut) == cut.rest
        assert p.engine.stats.prompt_tokens_computed == 9 + 12 - 1
        assert (d.engine.stats.steps, d.engine.stats.prompt_tokens_computed) == (8, 0)


@pytest.mark.parametrize("at", [1, 7, 8, 9, 17])
async def test_all_of_the_handed_over_state_is_needed(at: int) -> None:
    """That of the tokens given out as well as the prompt's, up to the last row."""
    cut = await cut_off(prompt_of(6, 3), SamplingSpec(max_tokens=at + 6, ignore_eos=True), at)
    async with running() as p, running() as d:
        first = await hand_over(p, d, KEY, cut)
        table, last = d.engine.unit_tables(KEY)[0], 6 + at - 2
        assert len(table) == last // 4 + 1
        d.pool.tensors[0][:, table[last // 4], :, last % 4] += 1
        d.engine.start_prefilled(KEY, first)
        await d.finish(KEY)
        assert [out.token for out in d.tokens] != [token for _, token, *_ in cut.rest[0]]


async def test_the_models_length_ends_it_where_it_would_have() -> None:
    async with running(max_model_len=20) as bench:
        sampling = SamplingSpec(max_tokens=1000, ignore_eos=True)
        whole = await uninterrupted(bench, OLD, prompt_of(12, 1), sampling)
        assert len(whole[0]) == 8
        cut = Cut(prompt_of(12, 1), sampling, tuple(map(tuple, whole)), (7,))
        assert await go_on_local(bench, KEY, cut) == cut.rest
        with pytest.raises(InvalidRequest, match="choice 0 is finished by the tokens"):
            bench.engine.reserve(KEY, cut.prompt, sampling, decodes=True, past=Past(((1,) * 8,)))


async def test_one_that_got_far_in_a_small_pool_is_taken_by_another_such() -> None:
    """There is no room for the steps that a new request is promised, and none is needed yet."""
    cut = await cut_off(prompt_of(9, 1), SamplingSpec(max_tokens=15, ignore_eos=True), 12)
    async with running(num_pages=6, page_tokens=4, growth_tokens=64) as bench:
        assert bench.engine.wanted(cut.prompt, cut.sampling, decodes=True, past=cut.past) == (6, 1)
        assert await go_on_local(bench, KEY, cut) == cut.rest
    longer = cut.sampling.model_copy(update={"max_tokens": 100})
    async with running(num_pages=6, page_tokens=4, growth_tokens=64) as bench:
        assert bench.engine.wanted(cut.prompt, longer, decodes=True, past=cut.past) == (6, 1)
        with pytest.raises(InvalidRequest, match="needs 7 pages"):
            bench.engine.reserve(KEY, cut.prompt, longer, decodes=True, past=Past(((1,) * 16,)))
        bench.engine.reserve(OLD, (1,), SamplingSpec(max_tokens=2), decodes=True)
        with pytest.raises(PoolExhausted):
            bench.engine.reserve(KEY, cut.prompt, longer, decodes=True, past=cut.past)
        await bench.engine.retire(OLD)
        assert bench.is_empty()


@pytest.mark.parametrize(
    ("past", "message"),
    [
        (Past(((1,),)), "2 choices, and 1 of them have a past"),
        (Past(((1,), (1,), (1,))), "2 choices, and 3 of them have a past"),
        (Past((), (0,)), "choice 0 is finished, and 0 have a past"),
        (Past(((1,), (1,)), (2,)), "choice 2 is finished, and 2 have a past"),
        (Past(((1,), (1,)), (0, 1)), "nothing is left to do"),
        (Past(((1,), (1, VOCAB_SIZE))), "token ids must be 0 to 255"),
        (Past(((1,), (-1,)), (1,)), "token ids must be 0 to 255"),
        (Past(((1,), (1,) * 6)), "choice 1 has 6 tokens already, of at most 5"),
        (Past(((1,), (1,) * 6), (1,)), "choice 1 has 6 tokens already, of at most 5"),
        (Past(((1,), (1,) * 5)), "choice 1 is finished by the tokens"),
        (Past(((1, 9), (1,))), "choice 0 is finished by the tokens"),
        (Past(((9, 1), (1,))), "choice 0 is finished by the tokens"),
        (Past(((1,), (EOS_TOKEN,))), "choice 1 is finished by the tokens"),
    ],
)
async def test_a_past_that_no_such_request_has_is_refused(past: Past, message: str) -> None:
    sampling = SamplingSpec(n=2, max_tokens=5, stop_token_ids=(9,))
    async with running() as bench:
        with pytest.raises(InvalidRequest, match=message):
            bench.engine.wanted(prompt_of(5, 1), sampling, decodes=True, past=past)
        with pytest.raises(InvalidRequest, match=message):
            bench.engine.reserve(KEY, prompt_of(5, 1), sampling, decodes=True, past=past)
        assert bench.is_empty()


async def test_what_has_ended_a_choice_may_be_in_its_past() -> None:
    """And the end of a text, where the request ignores it."""
    async with running() as bench:
        over = Past(((9,), (1,)), (0,))
        bench.engine.reserve(OLD, (1,), SamplingSpec(n=2, stop_token_ids=(9,)), decodes=True, past=over)
        ignored = Past(((EOS_TOKEN, 1),))
        bench.engine.reserve(KEY, (1,), SamplingSpec(ignore_eos=True), decodes=True, past=ignored)
        await asyncio.gather(bench.engine.retire(OLD), bench.engine.retire(KEY))
        assert bench.is_empty()


def agree(given: list[Seen], expected: list[Seen], *, greedy: bool) -> None:
    """Rounding differs with the size of chunks: from a near tie on the tokens may go their own ways."""
    for ours, theirs in zip(given, expected, strict=True):
        assert ours[2] is not None
        assert theirs[2] is not None
        if ours[1] != theirs[1] and greedy:
            (_, best), (_, second), *_ = theirs[2].top
            assert best - second < NEAR_TIE, (ours, theirs)
            return
        assert (ours[:2], ours[3]) == (theirs[:2], theirs[3])
        assert abs(ours[2].logprob - theirs[2].logprob) < 2 * LOGIT_ROUNDING


@pytest.mark.parametrize("kind", ["greedy", "drawn", "penalties", "several"])
async def test_a_dense_model_goes_on_as_well(kind: str, tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "drawn": {"temperature": 0.9, "top_p": 0.9},
        "penalties": {"temperature": 0.9, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
        "several": {"temperature": 0.8, "n": 3},
    }
    warm_up()  # a bench waits for a step, and not for a compiler
    prepared = prepare(str(write_hf(tmp_path / "tiny", tiny_weights())), tmp_path / "cache")
    model = load_model(prepared.directory, weights="float32")
    sampling = SamplingSpec(seed=11, max_tokens=40, ignore_eos=True, logprobs=2, **kinds[kind])
    prompt = tuple(k * 37 % len(VOCAB) for k in range(21))
    sizes = {"page_tokens": 16, "num_pages": 64, "prefill_chunk": 24}

    def bench() -> AbstractAsyncContextManager[EngineBench]:
        return running(model, ThreadExecutor(1), **sizes)

    async with bench() as alone:
        whole = await uninterrupted(alone, KEY, prompt, sampling)
    for at in ((1, 12, 39), (29, 0, 3)):
        cut = Cut(prompt, sampling, tuple(map(tuple, whole)), at[: sampling.n])
        async with bench() as p, bench() as d, bench() as alone:
            for given in (await go_on_prefilled(p, d, KEY, cut), await go_on_local(alone, KEY, cut)):
                for ours, rest in zip(given, cut.rest, strict=True):
                    agree(ours, rest, greedy=kind == "greedy")
