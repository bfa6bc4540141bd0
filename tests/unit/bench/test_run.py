"""A whole run against a server that is not Baton, over a real socket."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from typer.testing import CliRunner

from services.bench.campaign import run_campaign
from services.bench.errors import BenchError
from services.bench.figures.summary import Summary
from services.bench.options import BenchOptions, CampaignOptions, NamedTarget
from services.bench.run import run_bench
from services.cli import app
from tests.unit.bench.stub_server import END, StubServer, event, piece, stub_server, three_tokens, usage


@pytest_asyncio.fixture
async def server() -> AsyncIterator[StubServer]:
    async with stub_server() as running:
        yield running


async def run(server: StubServer, **options: Any) -> Summary:
    return (await run_bench(BenchOptions(**({"url": server.url, "num_requests": 1} | options)))).summary


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_figures_of_a_plain_server(server: StubServer, api: str) -> None:
    found = await run(server, api=api, num_requests=4, concurrency=2, prompt_tokens="50", max_tokens="7")
    assert (found.succeeded, found.failed) == (4, 0)
    assert (found.completion_tokens, found.counted_by) == (12, "usage")
    assert found.prompt_tokens == 4 * 50  # it found out how many tokens this server makes of a word
    assert found.gap_s is not None
    assert found.gap_s.count == 4  # two pieces each
    assert 0.0 < found.gap_s.p50 < 10.0  # written 0.02 s apart; when they are read is the machine's affair
    assert found.token_time_s is not None
    assert found.token_time_s.p50 == pytest.approx(found.gap_s.p50 / 2, rel=0.5)
    assert (found.paths, found.handoff_gap_s) == ({}, None)
    assert {body["max_tokens"] for body in server.bodies} == {7}


async def test_a_plain_server_gets_nothing_that_openai_does_not_know(server: StubServer) -> None:
    await run(server)
    assert set(server.bodies[0]) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert server.bodies[0]["model"] == "stub"


async def test_what_is_asked_for_is_sent(server: StubServer) -> None:
    await run_bench(BenchOptions(url=f"{server.url}/v1/", num_requests=1, model="other", ignore_eos=True), "secret")
    assert server.bodies[0]["model"] == "other"
    assert server.bodies[0]["ignore_eos"] is True
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_all_prompts_are_the_same_in_the_next_run(server: StubServer) -> None:
    for _ in range(2):
        await run(server, num_requests=3, seed=5)
    first, second = server.bodies[:3], server.bodies[3:]
    assert first == second
    assert len({body["prompt"] for body in first}) == 3


async def test_an_open_load(server: StubServer) -> None:
    found = await run(server, num_requests=10, rate=100.0)
    assert (found.succeeded, found.requests) == (10, 10)


async def test_refusals_are_counted_by_status_and_code(server: StubServer) -> None:
    server.refuse = web.json_response({"error": {"message": "later", "code": "queue_full"}}, status=429)
    found = await run(server, num_requests=3)
    assert (found.succeeded, found.failed) == (0, 3)
    assert found.errors == {"429 queue_full": 3}


async def test_a_server_that_does_not_stream(server: StubServer) -> None:
    server.refuse = web.json_response({"choices": [{"text": "a"}]})
    assert (await run(server)).errors == {"200 but no stream (application/json)": 1}


async def breaks_off(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(piece("a"))


async def fails_half_way(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(piece("a") + event(error={"message": "gone", "code": "worker_lost"}))


async def babbles(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(b"data: }{\n\n" + END)


async def hangs_up(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(piece("a"))
    assert response._req is not None
    assert response._req.transport is not None
    response._req.transport.abort()


async def sleeps(response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(piece("a"))
    await asyncio.sleep(60.0)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (breaks_off, "stream: broke off"),
        (fails_half_way, "stream: worker_lost"),
        (babbles, "stream: not JSON"),
        (hangs_up, "connection: ClientPayloadError"),
        (sleeps, "timed out"),
    ],
)
async def test_streams_that_fail(server: StubServer, stream: Any, error: str) -> None:
    server.stream = stream
    timeout_s = 0.5 if stream is sleeps else 30.0
    assert (await run(server, timeout_s=timeout_s)).errors == {error: 1}


async def test_an_answer_without_text_is_an_answer(server: StubServer) -> None:
    async def ends_at_once(response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.write(piece("", finish_reason="stop") + usage(12, 1) + END)

    server.stream = ends_at_once
    found = await run(server)
    assert (found.succeeded, found.completion_tokens) == (1, 1)
    assert found.ttft_s is not None


async def test_a_server_that_counts_nothing(server: StubServer) -> None:
    async def uncounted(response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.write(piece("a") + piece("b") + END)

    server.stream, server.counts = uncounted, False
    found = await run(server)
    assert (found.completion_tokens, found.counted_by, found.prompt_len) == (2, "pieces", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://127.0.0.1:1"}, "nothing answers at http://127.0.0.1:1/v1/models (connection refused)"),
        ({"url": "ftp://x"}, "--url ftp://x: write http://HOST:PORT"),
        ({"path": "remote"}, "--path needs a Baton server"),
        ({"prompt_tokens": "many"}, "--prompt-tokens many: write a number of tokens"),
    ],
)
async def test_mistakes_are_told_in_one_sentence(server: StubServer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError) as raised:
        await run(server, **options)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


async def test_interrupted_it_prints_and_writes_what_it_has(server: StubServer, tmp_path: Path) -> None:
    async def slower_and_slower(response: web.StreamResponse, body: dict[str, Any]) -> None:
        if len(server.bodies) <= 2:
            await three_tokens(response, body)
        else:
            hanging.set()
            await sleeps(response, body)

    hanging, server.stream = asyncio.Event(), slower_and_slower
    json_file = tmp_path / "run.json"
    arguments = ["bench", "--url", server.url, "--requests", "50", "--json", str(json_file)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"COLUMNS": "120"},
    )
    await asyncio.wait_for(hanging.wait(), 30.0)
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 30.0)
    assert process.returncode == 130, err.decode()
    assert "stopped early" in out.decode()
    assert "time to first token" in out.decode()
    assert "Traceback" not in err.decode()
    written = json.loads(json_file.read_text())
    (run,) = written["runs"]
    assert run["stopped"] is True
    assert [request["outcome"] for request in run["requests"]] == ["ok", "ok", "cancelled"]
    assert run["summary"]["succeeded"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--burst", "2/8"], "--burst says how requests of a --rate arrive"),
        (["--rate", "1", "--rates", "1,2"], "--rate and --rates: give one of the two"),
        (["--rate", "1", "--burst", "often"], "--burst often: write ON/OFF in seconds"),
        (["--trace", "nowhere.jsonl"], "--trace nowhere.jsonl: No such file or directory"),
        (["--compare", "http://127.0.0.1:1"], "--compare http://127.0.0.1:1: write NAME=URL"),
        (["--json", "/nowhere/run.json"], "--json /nowhere/run.json: No such file or directory"),
    ],
)
def test_mistakes_in_flags_are_told_before_anything_is_sent(flags: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["bench", *flags])
    assert found.exit_code == 1
    assert found.stderr.startswith(f"baton: {message}")
    assert found.stderr.count("\n") == 1


async def test_a_server_of_a_comparison_that_is_not_there_is_named(server: StubServer) -> None:
    targets = (NamedTarget("one", server.url), NamedTarget("gone", "http://127.0.0.1:1"))
    with pytest.raises(BenchError, match=r"^gone: nothing answers at http://127.0.0.1:1/v1/models"):
        await run_campaign(CampaignOptions(BenchOptions(), targets))
    assert server.bodies == []


async def test_two_servers_get_the_same_requests_whatever_their_tokenizers(server: StubServer) -> None:
    async with stub_server() as other:
        other.counts = False
        targets = (NamedTarget("one", server.url), NamedTarget("two", other.url))
        base = BenchOptions(num_requests=3, prompt_tokens="40-90", max_tokens="2-9")
        found = await run_campaign(CampaignOptions(base, targets, rounds=2))
        assert server.bodies == other.bodies
        assert len({body["prompt"] for body in server.bodies}) == 6
    assert [(run.round, run.target) for run in found.runs] == [(1, "one"), (1, "two"), (2, "one"), (2, "two")]
    assert all(0.0 < run.result.client_cpu_share < 1.5 for run in found.runs)
    assert {row.metric for row in found.compared()} >= {"output", "first token p99", "largest gap p99"}
