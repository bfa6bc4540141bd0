"""The flags of `baton bench`. Light to import: what it needs is loaded when it runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

EXAMPLES = """Examples:

- `baton bench` — 32 requests, one after the other, at the cluster on this machine
- `baton bench --concurrency 8 --requests 100 --prompt-tokens 64-512 --max-tokens 64`
- `baton bench --rate 2 --duration 60 --burst 2/8` — two a second on average, all within 2 of every 10 seconds
- `baton bench --trace mooncake.jsonl --block-tokens 16 --time-scale 5` — a recorded load, five times slower
- `baton bench --rates 0.5,1,2,4 --duration 30 --ttft-limit 2 --gap-limit 0.2 --plots plots` — what rate is served well
- `baton bench --compare baton=http://127.0.0.1:8000 --compare other=http://127.0.0.1:9000 --rounds 3 --rate 1 -n 40`
- `baton bench --url http://10.0.0.5:8000 --model my-model --api chat --ignore-eos` — any OpenAI-compatible server

A trace is JSONL as Mooncake published it: `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for
every 512 tokens. `benchmarks/traces/` has a piece of one.
"""

_LOAD, _TRACE, _SERVER, _MANY, _OUTPUT = "Load", "Trace", "Server", "Sweeps and comparisons", "Judging and output"


class ApiName(StrEnum):
    completions = "completions"
    chat = "chat"


class PathName(StrEnum):
    auto = "auto"
    remote = "remote"
    local = "local"


def bench(
    url: Annotated[
        str, typer.Option(help="The server, with or without /v1.", rich_help_panel=_SERVER)
    ] = "http://127.0.0.1:8000",
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            min=1,
            help="Streams kept busy; of an open load: in flight at most. [default: 1; open: 512]",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", "-n", min=1, help="Ends after so many. [default: 32; a trace: all]", rich_help_panel=_LOAD
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Requests a second, at random times (Poisson); with a trace: its time is stretched to that.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    burst: Annotated[
        str | None,
        typer.Option(
            help="How they arrive: ON/OFF in seconds, or a number: 0 evenly, 1 Poisson, 4 in clumps (gamma).",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Sends for so many seconds.", rich_help_panel=_LOAD)
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Length of prompts, or a range.", rich_help_panel=_LOAD)] = "128",
    max_tokens: Annotated[str, typer.Option(help="Length of answers, or a range.", rich_help_panel=_LOAD)] = "32",
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts begin with.", rich_help_panel=_LOAD)
    ] = 0,
    seed: Annotated[
        int, typer.Option(min=0, help="Another seed: other prompts, lengths and times.", rich_help_panel=_LOAD)
    ] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Replays this file instead of random requests.", rich_help_panel=_TRACE)
    ] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds of ours for one of the trace. [default: 1]", rich_help_panel=_TRACE),
    ] = None,
    block_tokens: Annotated[
        int,
        typer.Option(min=1, max=512, help="What 512 tokens of the trace become, answers too.", rich_help_panel=_TRACE),
    ] = 16,
    max_context: Annotated[
        int | None,
        typer.Option(
            min=2, help="Leaves out longer requests, scaled. [default: what the model takes]", rich_help_panel=_TRACE
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="Instead of --url; repeat it. All get the same requests; ratios are against the first.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="So many times, in turns; medians count.", rich_help_panel=_MANY)
    ] = 1,
    rates: Annotated[
        str | None, typer.Option(metavar="R1,R2,…", help="A load at each rate.", rich_help_panel=_MANY)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Default: the first that the server lists.", rich_help_panel=_SERVER)
    ] = None,
    api: Annotated[ApiName, typer.Option(help="Which route is asked.", rich_help_panel=_SERVER)] = ApiName.completions,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY", help="Where the server wants one.", show_default=False, rich_help_panel=_SERVER
        ),
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            help="Answers of full length, by a field that OpenAI's own server refuses. [default: where all are Baton]",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    path: Annotated[
        PathName | None, typer.Option(help="Baton only: this way and no other.", rich_help_panel=_SERVER)
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds until a request counts as failed.", rich_help_panel=_SERVER)
    ] = 300.0,
    ttft_limit: Annotated[
        float | None,
        typer.Option(min=0.0, help="Goodput: seconds to the first token at most.", rich_help_panel=_OUTPUT),
    ] = None,
    gap_limit: Annotated[
        float | None,
        typer.Option(min=0.0, help="Goodput: seconds of every gap after it at most.", rich_help_panel=_OUTPUT),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything that was seen here.", rich_help_panel=_OUTPUT)
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write PNG plots here; needs matplotlib.", rich_help_panel=_OUTPUT),
    ] = None,
) -> None:
    """Sends a load to OpenAI-compatible servers and says how they fared.

    A closed load keeps --concurrency streams busy. An open load, with --rate or --trace, sends whether or not earlier
    requests have been answered. Prompts are made from the seed and share no beginning, so that no cache serves them; a
    second run with the same seed repeats them. Prompts of a trace share what they shared when it was recorded.

    Ends with 1 where no request succeeded, and with 130 after Ctrl-C.
    """
    from services.bench.errors import BenchError
    from services.bench.figures.goodput import Limits
    from services.bench.options import BenchOptions, CampaignOptions, TraceOptions, parse_rates, parse_targets
    from services.bench.session import Outputs
    from services.bench.session import bench as run

    try:
        several = () if rates is None else parse_rates(rates)
        if several and rate is not None:
            raise BenchError("--rate and --rates: give one of the two")
        base = BenchOptions(
            url=url,
            api=api.value,
            model=model,
            concurrency=concurrency,
            rate=several[0] if several else rate,
            burst=burst,
            trace=None if trace is None else TraceOptions(trace, time_scale, block_tokens, max_context),
            num_requests=requests,
            duration_s=duration,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            shared_prefix=shared_prefix,
            seed=seed,
            ignore_eos=ignore_eos,
            path=None if path is None else path.value,
            timeout_s=timeout,
            limits=Limits(ttft_limit, gap_limit),
        )
        options = CampaignOptions(base, parse_targets(compare or []), several, rounds)
        result = run(options, Outputs(json_file, plots), api_key, Console())
    except BenchError as error:
        Console(stderr=True).print(f"baton: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
    if result.stopped:
        raise typer.Exit(130)
    if not any(run.result.summary.succeeded for run in result.runs):
        raise typer.Exit(1)
