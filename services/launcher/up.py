"""`baton up`, from flags to the last process's end."""

import asyncio
from collections.abc import Callable
from functools import partial

from rich.console import Console

from services.launcher.cluster import Cluster, StopSignals
from services.launcher.display import Display, ModelProgress
from services.launcher.errors import LaunchError
from services.launcher.plan import (
    Command,
    ProcessSpec,
    UpOptions,
    chosen_settings,
    gateway_names,
    own_nats,
    plan_processes,
    process_names,
    python_module,
    settle_mode,
)
from services.launcher.state_dir import free_port, open_state_dir
from shared.engine.weights.catalog import prepare
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.packed import prepare_weights
from shared.runtime.flags import unknown_variables
from shared.runtime.settings import (
    ROLES,
    ConfigError,
    GatewaySettings,
    WorkerSettings,
    load_settings,
)


def up(options: UpOptions, console: Console, command: Command = python_module, *, prepare_model: bool = True) -> None:
    """Runs a cluster until it is told to end; LaunchError where it cannot. command: what to start, for each role."""
    if options.num_gateway < 1:
        raise LaunchError("a cluster needs at least one gateway")
    if (options.num_prefill or 0) < 0 or options.num_decode < 1:
        raise LaunchError("a cluster needs at least one decode worker (with --prefill 0 it computes prompts itself)")
    options = settle_mode(options)
    chosen = chosen_settings(options)
    try:
        gateway = load_settings(GatewaySettings, own_nats() | chosen[gateway_names(options)[0]])
        urls = _choose_ports(options, chosen)
    except ConfigError as error:
        raise LaunchError(str(error)) from error
    for line in unknown_variables():
        console.print(f"warning: {line}", style="yellow", soft_wrap=True)
    with open_state_dir(options.state_dir) as state_dir:
        given = {
            "state_dir": str(state_dir.path),
            "ipc_dir": str(state_dir.ipc_dir),
            "cache_dir": str(gateway.cache_dir.absolute()),
            "log_format": "bare",
        }

        def plan(nats_url: str) -> list[ProcessSpec]:
            return plan_processes(options, chosen, given | own_nats(nats_url), command)

        plan(own_nats()["nats_url"])  # a mistake is told now, not after minutes of preparing
        served = _prepare_models(options, chosen, console) if prepare_model else gateway.model
        keys = gateway.api_keys.get_secret_value()
        display = Display(console, [name for name, _ in process_names(options)])

        def on_ready() -> None:
            display.ready(urls[0], served, _summary(options), wants_key=bool(keys or gateway.api_keys_file))

        cluster = partial(Cluster, state_dir, display.line, display.phase, restart=options.restart)
        try:
            asyncio.run(_run(cluster, plan, [f"{url}/health" for url in urls], on_ready, display))
        finally:
            display.stop()
        display.say("All processes have ended.")


def _choose_ports(options: UpOptions, chosen: dict[str, dict[str, str]]) -> list[str]:
    """Of each gateway, the first one's first: the others' are free ones unless they were given ports of their own.
    Their URLs."""
    urls: list[str] = []
    taken: set[int] = set()
    for name in gateway_names(options):
        settings = load_settings(GatewaySettings, own_nats() | chosen[name])
        is_own = not taken or ("port" in chosen[name] and settings.port not in taken)
        port = free_port(settings.host, settings.port if is_own else 0)
        taken.add(port)
        chosen[name]["port"] = str(port)
        urls.append(_url(settings.host, str(port)))
    return urls


def _prepare_models(options: UpOptions, chosen: dict[str, dict[str, str]], console: Console) -> str:
    """Once, here, rather than in every process at the same time; they get the directory. Returns the gateway's name."""
    served = ""
    for name, role in process_names(options):
        settings = load_settings(ROLES[role], own_nats() | chosen[name])
        if not isinstance(settings, WorkerSettings | GatewaySettings):
            continue
        with ModelProgress(console, settings.model) as progress:
            try:
                prepared = prepare(settings.model, settings.cache_dir.absolute(), progress)
                if isinstance(settings, WorkerSettings):
                    prepare_weights(prepared, settings.device, settings.dtype, settings.weights, progress)
            except (InvalidModel, ConfigError) as error:
                raise LaunchError(f"model {settings.model}: {error}") from error
        chosen[name]["model"] = str(prepared.directory)
        served = prepared.name
    return served


def _summary(options: UpOptions) -> str:
    roles = [role for _, role in process_names(options)]
    workers = f"{roles.count('prefill')} prefill, {roles.count('decode')} decode"
    if options.num_gateway > 1:
        workers += f", {options.num_gateway} gateways"
    return workers if options.mode == "separated" else f"{options.mode}, {roles.count('decode')} decode"


def _url(host: str, port: str) -> str:
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


async def _run(
    make_cluster: Callable[[], Cluster],
    plan: Callable[[str], list[ProcessSpec]],
    health_urls: list[str],
    on_ready: Callable[[], None],
    display: Display,
) -> None:
    cluster = make_cluster()
    with StopSignals(cluster.kill) as signals:
        try:
            async with cluster:
                display.start()
                cluster.start(plan(cluster.nats_url), health_urls, on_ready)
                await signals.requested.wait()
                display.stop()
                display.say("Ending …")
        except ExceptionGroup as group:
            raise _first_launch_error(group) from group


def _first_launch_error(group: ExceptionGroup[Exception]) -> Exception:
    launch, _ = group.split(LaunchError)
    inner: BaseException | None = launch
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    return inner if isinstance(inner, LaunchError) else group
