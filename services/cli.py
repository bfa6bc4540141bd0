"""The `baton` command. Each command's work lives in a module of its own, imported when it is asked for."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.bench import command as bench_command
from shared.runtime.mode import Mode

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serves large language models with prefill and decode on separate workers.",
    epilog="Start with `baton up`, then `baton chat` in another terminal.",
)
models_app = typer.Typer(help="The models on this machine; lists them unless told otherwise.")
app.add_typer(models_app, name="models")
app.command("bench", epilog=bench_command.EXAMPLES)(bench_command.bench)

Url = Annotated[str, typer.Option(help="Where the gateway answers.")]
ModelArgument = Annotated[str | None, typer.Argument(help="A name, a GGUF file or a directory.")]


def main() -> None:
    app()


def _fail(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"baton: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(1)


@app.command(epilog="Example: `baton up --prefill 2 --decode 3 --set decode.num_pages=4096`")
def up(
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers. [default: 1; none where --mode is not separated]", min=0)
    ] = None,
    decode: Annotated[int, typer.Option(help="Decode workers.", min=1)] = 1,
    kvstore: Annotated[int, typer.Option(help="Stores of blocks.", min=0)] = 1,
    gateway: Annotated[
        int, typer.Option(help="Gateways; --port is the first one's, the others' are free ones.", min=1)
    ] = 1,
    port: Annotated[
        int | None,
        typer.Option("--port", "--gateway-port", help="Port clients reach; 0: a free one. [default: 8000]"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A name of `baton models`, a GGUF file or a directory.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cpu]")] = None,
    mode: Annotated[
        Mode | None,
        typer.Option(
            help="separated: prefill workers compute prompts. colocated: decode workers do, whole. chunked: decode "
            "workers do, in steps of at most --step-tokens. [default: separated]"
        ),
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option(help="With --mode chunked: most tokens of a step. [default: 256]", min=1)
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Format of the weights on a CPU: float32, float16, int8 or int4.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="What keys and values are kept in: float32, float16 or fp8. [default: float32]")
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where the cluster keeps its files. [default: new]")] = None,
    no_restart: Annotated[bool, typer.Option("--no-restart", help="Leave dead what dies.")] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SET", help="ROLE.field=value, NAME.field=value or common.field=value; repeat."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Starts a cluster of processes on this machine and shows their logs until Ctrl-C.

    Needs no server that runs already. Two clusters run side by side, each with its own --port. To compare modes, run
    `--prefill 1 --decode 1`, `--mode colocated --decode 2` and `--mode chunked --decode 2`.
    `baton serve ROLE --help` lists what --set can set.
    """
    from services.launcher.errors import LaunchError
    from services.launcher.plan import UpOptions
    from services.launcher.up import up as run

    options = UpOptions(
        num_prefill=prefill,
        num_decode=decode,
        num_kvstore=kvstore,
        num_gateway=gateway,
        port=port,
        model=model,
        device=device,
        weights=weights,
        kv_dtype=kv_dtype,
        state_dir=state_dir,
        restart=not no_restart,
        sets=tuple(sets or ()),
        verbose=verbose,
        mode=mode,
        step_tokens=step_tokens,
    )
    try:
        run(options, Console(highlight=False))
    except LaunchError as error:
        raise _fail(error) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    epilog="Examples: `baton serve decode --help`; `baton serve decode --nats-url nats://10.0.0.5:4222 --threads 8`",
)
def serve(ctx: typer.Context, role: Annotated[str, typer.Argument(help="What to run.")] = "") -> None:
    """Runs one process: gateway, prefill, decode or kvstore. A worker starts its sidecar itself.

    Its settings come from flags, from BATON_ROLE_FIELD and BATON_FIELD, and from the TOML file BATON_CONFIG names.
    `baton serve ROLE --help` lists them.
    """
    from shared.runtime.settings import ROLES

    if role == "sidecar" and not {"-h", "--help", "--control-fd"} & {arg.partition("=")[0] for arg in ctx.args}:
        raise _fail(
            ValueError(
                "a sidecar is started by its worker and ends with it; its settings go to the worker, as "
                "BATON_SIDECAR_<FIELD> (`baton serve sidecar --help` lists them)"
            )
        )
    if role in ("", "-h", "--help"):
        typer.echo(ctx.get_help())
        raise typer.Exit(0)
    if role not in ROLES:
        raise _fail(ValueError(f"no role {role!r}; there are {', '.join(ROLES)}"))
    os.execv(sys.executable, [sys.executable, "-m", f"services.{role}", *ctx.args])


@app.command(epilog="Examples: `baton chat`; `baton chat --say 'Why is the sky blue?' --path local`")
def chat(
    url: Url = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the one that is served.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0.0, max=2.0)] = 0.2,
    path: Annotated[str, typer.Option(help="Where prompts are computed: auto, remote or local.")] = "auto",
    say: Annotated[str | None, typer.Option(help="Ask this, print the answer, and end.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Where the gateway wants one.", show_default=False)
    ] = None,
) -> None:
    """Talks to a running cluster; each answer says which way it took. /exit ends, /new forgets what was said."""
    from services.chat import ChatError, ChatOptions
    from services.chat import chat as run

    try:
        run(ChatOptions(url.rstrip("/"), model, system, max_tokens, temperature, path, api_key), say)
    except ChatError as error:
        raise _fail(error) from error


@app.command(epilog="Example: `baton doctor --port 8080`")
def doctor(port: Annotated[int, typer.Option(help="The port you want to serve on.")] = 8000) -> None:
    """Checks whether this machine can run a cluster, and says what to do where it cannot."""
    from services.doctor import examine

    if not examine(Console(highlight=False), port):
        raise typer.Exit(1)


@models_app.callback(invoke_without_command=True)
def models(ctx: typer.Context) -> None:
    """The models on this machine; lists them unless told otherwise."""
    if ctx.invoked_subcommand is None:
        models_list()


@models_app.command("list", epilog="Example: `baton models list`")
def models_list() -> None:
    """Lists models that can be had by name, and those that are prepared."""
    from shared.engine.weights.catalog import list_cached
    from shared.engine.weights.origin import PACKAGED

    prepared = list_cached(_cache_dir())
    for name in sorted(set(PACKAGED) - {model.name for model in prepared}):
        typer.echo(f"{name}  not prepared yet (baton models prepare {name})")
    for model in prepared:
        typer.echo(f"{model.name}  {model.directory}")


@models_app.command("prepare", epilog="Example: `baton models prepare ~/models/my-llama.gguf`")
def models_prepare(
    model: ModelArgument = None,
    weights: Annotated[str | None, typer.Option(help="Also in this format: float16, int8 or int4.")] = None,
) -> None:
    """Prepares a model, once: fetches what has a name, and lays the weights out for all workers to map."""
    typer.echo(_prepare(model, weights))


@models_app.command("path", epilog="Example: `baton serve decode --model $(baton models path)`")
def models_path(model: ModelArgument = None) -> None:
    """Prints the directory of a prepared model, and prepares it first if need be."""
    typer.echo(_prepare(model))


def _cache_dir() -> Path:
    from shared.runtime.settings import ConfigError, GatewaySettings, load_settings

    try:
        return load_settings(GatewaySettings).cache_dir
    except ConfigError as error:
        raise _fail(error) from error


def _prepare(model: str | None, weights: str | None = None) -> Path:
    from services.launcher.display import ModelProgress
    from shared.engine.weights.catalog import prepare
    from shared.engine.weights.errors import InvalidModel
    from shared.engine.weights.packed import prepare_weights
    from shared.runtime.settings import DEFAULT_MODEL, ConfigError

    name = model or DEFAULT_MODEL
    try:
        with ModelProgress(Console(stderr=True, highlight=False), name) as progress:
            prepared = prepare(name, _cache_dir(), progress)
            prepare_weights(prepared, "cpu", "float32", weights, progress)
            return prepared.directory
    except (InvalidModel, ConfigError) as error:
        raise _fail(error) from error


if __name__ == "__main__":
    main()
