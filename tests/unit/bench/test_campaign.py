"""What servers of one comparison have in common, and which runs count."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from services.bench.campaign import Campaign, run_campaign
from services.bench.options import BenchOptions, CampaignOptions, NamedTarget, TraceOptions
from tests.unit.bench.stub_server import StubServer, stub_server


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[tuple[StubServer, StubServer]]:
    async with stub_server() as one, stub_server() as two:
        yield one, two


def options(servers: tuple[StubServer, StubServer], base: BenchOptions) -> CampaignOptions:
    return CampaignOptions(base, tuple(NamedTarget(f"s{k}", server.url) for k, server in enumerate(servers)))


@pytest.mark.parametrize(("batons", "asked"), [(0, None), (1, None), (2, True)])
async def test_answers_of_full_length_are_asked_of_all_or_of_none(
    servers: tuple[StubServer, StubServer], batons: int, asked: bool | None
) -> None:
    for server in servers[:batons]:
        server.is_baton = True
    await run_campaign(options(servers, BenchOptions(num_requests=2, sample=False)))
    assert [body.get("ignore_eos") for server in servers for body in server.bodies] == [asked] * 4


@pytest.mark.parametrize("limits", [(400, 30), (30, 400), (None, 30)])
async def test_what_one_server_cannot_take_none_of_them_gets(
    servers: tuple[StubServer, StubServer], limits: tuple[int | None, int | None], tmp_path: Path
) -> None:
    for server, limit in zip(servers, limits, strict=True):
        server.max_model_len = limit
    lines = [
        {"timestamp": 10 * k, "input_length": 512 * n, "output_length": 32, "hash_ids": list(range(n))}
        for k, n in enumerate((1, 3, 1))
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    base = BenchOptions(trace=TraceOptions(tmp_path / "trace.jsonl"), sample=False)
    found = await run_campaign(options(servers, base))
    assert [(run.result.left_out, run.result.summary.succeeded) for run in found.runs] == [(1, 2)] * 2
    assert servers[0].bodies == servers[1].bodies


async def test_a_run_that_was_stopped_is_written_and_not_compared(servers: tuple[StubServer, StubServer]) -> None:
    found = await run_campaign(options(servers, BenchOptions(num_requests=1)))
    whole, half = found.runs
    stopped = Campaign(found.options, [whole, replace(half, result=replace(half.result, stopped=True))])
    assert (found.stopped, stopped.stopped) == (False, True)
    assert {tuple(row.values) for row in found.compared()} == {("s0", "s1")}
    assert {tuple(row.values) for row in stopped.compared()} == {("s0",)}
    written = stopped.as_dict()
    assert [run["stopped"] for run in written["runs"]] == [False, True]
    assert len(written["comparison"]) == len(stopped.compared()) > 5
