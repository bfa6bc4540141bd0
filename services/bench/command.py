"""The flags of `baton bench`. Light to import: what it needs is loaded when it runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

EXAMPLES = """Examples:

- `baton bench` — 32 requests, one after the other, at the cluster on this machine
- `baton bench --concurrency 8 --requests 100 --prompt-tokens 64-512 --max-tokens 64`
- `baton bench --rate 2 --duration 60 --json run.json` — requests arrive at random, two a second
- `baton bench --url http://10.0.0.5:8000 --model my-model --api chat --ignore-eos` — any OpenAI-compatible server
"""


class ApiName(StrEnum):
    completions = "completions"
    chat = "chat"


class PathName(StrEnum):
    auto = "auto"
    remote = "remote"
    local = "local"


def bench(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "-c", min=1, help="Streams kept busy; with --rate: in flight at most. [default: 1]"
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", "-n", min=1, help="Ends after so many. [default: 32]")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests a second, at random times (Poisson).")] = None,
    duration: Annotated[float | None, typer.Option(min=0.1, help="Sends for so many seconds.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Length of prompts, or a range.")] = "128",
    max_tokens: Annotated[str, typer.Option(help="Length of answers, or a range.")] = "32",
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed: other prompts, lengths and times.")] = 0,
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.")] = None,
    api: Annotated[ApiName, typer.Option(help="Which route is asked.")] = ApiName.completions,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Where the server wants one.", show_default=False)
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(help="Answers of full length, by a field that OpenAI's own server refuses. [default: for Baton]"),
    ] = None,
    path: Annotated[PathName | None, typer.Option(help="Baton only: this way and no other.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request counts as failed.")] = 300.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything that was seen here.")] = None,
) -> None:
    """Sends a synthetic load to an OpenAI-compatible server and says how it fared.

    A closed load keeps --concurrency streams busy. An open load, with --rate, sends whether or not earlier requests
    have been answered. Prompts are made from the seed and share no beginning, so that no cache serves them; a second
    run with the same seed repeats them. Ends with 1 where no request succeeded, and with 130 after Ctrl-C.
    """
    from services.bench.errors import BenchError
    from services.bench.run import BenchOptions
    from services.bench.run import bench as run

    options = BenchOptions(
        url=url,
        api=api.value,
        model=model,
        concurrency=concurrency,
        rate=rate,
        num_requests=requests,
        duration_s=duration,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        shared_prefix=shared_prefix,
        seed=seed,
        ignore_eos=ignore_eos,
        path=None if path is None else path.value,
        timeout_s=timeout,
    )
    try:
        result = run(options, json_file, api_key, Console())
    except BenchError as error:
        Console(stderr=True).print(f"baton: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
    if result.stopped:
        raise typer.Exit(130)
    if not result.summary.succeeded:
        raise typer.Exit(1)
