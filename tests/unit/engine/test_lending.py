"""Lent pages hold still whatever becomes of their group, and what came from elsewhere is not computed again."""

from pathlib import Path

import pytest
import torch

from shared.engine.models.registry import load_model
from shared.engine.weights.catalog import prepare
from shared.protocol.messages import SamplingSpec
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, as_sidecars_see_it, running
from tests.support_tiny_model import tiny_weights, write_hf

KEY, OTHER = TicketKey(1, 1), TicketKey(2, 1)
SAMPLING = SamplingSpec(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((k * 7 + k * k) % 97 for k in range(length))


def rows_of(bench: EngineBench, pages: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([tensor[:, list(pages)].flatten() for tensor in as_sidecars_see_it(bench.pool)[:1]]).clone()


async def test_lent_pages_outlive_their_group_and_are_counted() -> None:
    async with running(num_pages=16) as bench:
        bench.engine.reserve(KEY, prompt_of(20), SAMPLING, decodes=True)
        assert bench.engine.lend(KEY, 0, 8) is None, "nothing is computed yet"
        bench.engine.start_local(KEY)
        await bench.until(lambda: bool(bench.tokens))
        loan = bench.engine.lend(KEY, 4, 16)
        assert loan is not None
        assert len(loan.pages) == 3
        before = rows_of(bench, loan.pages)
        await bench.engine.retire(KEY)
        assert bench.engine.pages() == (16, 13, 3)
        bench.engine.reserve(OTHER, prompt_of(50), SAMPLING.model_copy(update={"max_tokens": 1}), decodes=True)
        bench.engine.start_local(OTHER)  # takes every other page
        await bench.finish(OTHER)
        assert torch.equal(rows_of(bench, loan.pages), before)
        await bench.engine.retire(OTHER)
        loan.close()
        loan.close()
        assert bench.is_empty()


async def test_only_what_is_computed_is_lent_and_only_in_whole_pages() -> None:
    async with running() as bench:
        bench.engine.reserve(KEY, prompt_of(9), SAMPLING, decodes=True)
        bench.engine.start_local(KEY)
        await bench.finish(KEY)
        loan = bench.engine.lend(KEY, 0, 20)  # prompt and answer but for the last token: 20 positions
        assert loan is not None
        assert bench.engine.lend(KEY, 0, 24) is None
        with pytest.raises(ValueError, match="whole pages"):
            bench.engine.lend(KEY, 0, 6)
        loan.close()
        await bench.engine.retire(KEY)
        assert bench.engine.lend(KEY, 0, 4) is None
        assert bench.is_empty()


async def test_whoever_gives_way_leaves_lent_pages_where_they_are_and_its_answer_is_the_same() -> None:
    """The pool is so small that the younger one gives way while its first pages are lent."""
    long = SAMPLING.model_copy(update={"max_tokens": 24})
    async with running(num_pages=64) as alone:
        whole = await alone.local(OTHER, prompt_of(12), long)
    async with running(num_pages=16, growth_tokens=1) as bench:
        for key, length in ((KEY, 20), (OTHER, 12)):
            bench.engine.reserve(key, prompt_of(length), long, decodes=True)
            bench.engine.start_local(key)
        await bench.until(lambda: bool(bench.text_of(OTHER)))
        loan = bench.engine.lend(OTHER, 0, 12)
        assert loan is not None
        before = rows_of(bench, loan.pages)
        await bench.until(lambda: any(OTHER in output.preempted for output in bench.outputs))
        assert bench.engine.lend(OTHER, 0, 12) is None
        assert torch.equal(rows_of(bench, loan.pages), before)
        loan.close()
        await bench.finish(KEY)
        await bench.engine.retire(KEY)
        await bench.finish(OTHER)
        assert [bench.text_of(OTHER)] == whole
        await bench.engine.retire(OTHER)
        assert bench.is_empty()


@pytest.mark.parametrize("held", [4, 16, 28])
async def test_what_came_from_elsewhere_is_not_computed_again(tmp_path: Path, held: int) -> None:
    write_hf(tmp_path / "model", tiny_weights())
    model = load_model(prepare(str(tmp_path / "model"), tmp_path / "cache").directory)
    prompt = prompt_of(30)
    async with running(model) as first, running(model) as second:
        first.engine.reserve(KEY, prompt, SAMPLING, decodes=True)
        first.engine.start_local(KEY)
        await first.finish(KEY)
        loan = first.engine.lend(KEY, 0, held)
        assert loan is not None
        second.engine.reserve(KEY, prompt, SAMPLING, decodes=True)
        for component, table in enumerate(second.engine.unit_tables(KEY)):
            here, there = as_sidecars_see_it(first.pool)[component], as_sidecars_see_it(second.pool)[component]
            for source, target in zip(loan.pages, table, strict=False):
                there[:, target] = here[:, source]
        second.engine.start_local(KEY, held)
        await second.finish(KEY)
        assert second.text_of(KEY) == first.text_of(KEY)
        assert second.engine.stats.prompt_tokens_computed == len(prompt) - held
        loan.close()


async def test_something_of_the_trunk_is_always_computed() -> None:
    async with running() as bench:
        bench.engine.reserve(KEY, prompt_of(8), SAMPLING, decodes=True)
        with pytest.raises(ValueError, match="8 of 8"):
            bench.engine.start_local(KEY, 8)
