"""Which processes a local cluster consists of, and with which settings: decided, and checked, before any is started."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.launcher.errors import LaunchError
from shared.runtime.cores import host_cores
from shared.runtime.credentials import NatsSettings
from shared.runtime.mode import Mode
from shared.runtime.settings import (
    PREFIX,
    ROLES,
    CommonSettings,
    ConfigError,
    GatewaySettings,
    WorkerSettings,
    load_settings,
)

WORKER_ROLES = ("prefill", "decode")
_SIDECAR_ROLES = (*WORKER_ROLES, "kvstore")
_SPINS = {"GOMP_SPINCOUNT": "1000"}
"""How long a compute thread waits awake between two kernels: some 20 us. Where there are more threads than cores it
must sleep at once, as it would wait on the core that the one it waits for needs."""

Command = Callable[[str], tuple[str, ...]]
"""role -> the command that runs one process of it."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What was asked of `baton up`. sets: `role.field=value`, `name.field=value` or `common.field=value`. num_prefill:
    None for what the mode makes of it. mode: None where settings decide."""

    num_prefill: int | None = None
    num_decode: int = 1
    num_kvstore: int = 1
    num_gateway: int = 1
    port: int | None = None
    model: str | None = None
    device: str | None = None
    weights: str | None = None
    kv_dtype: str | None = None
    state_dir: Path | None = None
    restart: bool = True
    sets: tuple[str, ...] = ()
    verbose: bool = False
    mode: Mode | None = None
    step_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: env holds its own settings, on top of the launcher's environment."""

    name: str
    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stop_timeout_s: float = 15.0


def python_module(role: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"services.{role}")


def process_names(options: UpOptions) -> list[tuple[str, str]]:
    """(name, role) of every process, in the order of their start."""
    workers = [(f"prefill-{k}", "prefill") for k in range(_num_prefill(options))]
    workers += [(f"decode-{k}", "decode") for k in range(options.num_decode)]
    stores = ["kvstore"] if options.num_kvstore == 1 else [f"kvstore-{k}" for k in range(options.num_kvstore)]
    gateways = gateway_names(options)
    return [*((name, "kvstore") for name in stores), *workers, *((name, "gateway") for name in gateways)]


def gateway_names(options: UpOptions) -> list[str]:
    """Each has a port of its own; the first has the one that was asked for."""
    return ["gateway"] if options.num_gateway == 1 else [f"gateway-{k}" for k in range(options.num_gateway)]


def _num_prefill(options: UpOptions) -> int:
    if options.num_prefill is None:
        return 1 if options.mode in (None, "separated") else 0
    return options.num_prefill


def settle_mode(options: UpOptions) -> UpOptions:
    """The options, with the mode that flags, --set and variables make. LaunchError where they do not go together."""
    try:
        mode = load_settings(GatewaySettings, own_nats() | chosen_settings(options)[gateway_names(options)[0]]).mode
    except ConfigError as error:
        raise LaunchError(str(error)) from error
    if mode != "separated" and options.num_prefill:
        raise LaunchError(
            f"mode {mode} has no prefill workers, since every decode worker computes whole requests: leave --prefill "
            "out, or say --mode separated"
        )
    if mode != "chunked" and options.step_tokens is not None:
        raise LaunchError(f"--step-tokens is the budget of --mode chunked; this is mode {mode}")
    return replace(options, mode=mode)


def chosen_settings(options: UpOptions) -> dict[str, dict[str, str]]:
    """process name (and `sidecar`) -> field -> value, out of the flags alone. LaunchError for what fits nowhere."""
    names = process_names(options)
    targets = {name: role for name, role in names} | {"sidecar": "sidecar"}
    chosen: dict[str, dict[str, str]] = {name: {} for name in targets}
    flags = {
        "model": options.model,
        "device": options.device,
        "log_level": "debug" if options.verbose else None,
        "mode": options.mode,
        "step_tokens": None if options.step_tokens is None else str(options.step_tokens),
        "weights": options.weights,
        "kv_dtype": options.kv_dtype,
    }
    for name, role in targets.items():
        chosen[name].update({k: v for k, v in flags.items() if v is not None and k in ROLES[role].model_fields})
    if options.port is not None:
        chosen[gateway_names(options)[0]]["port"] = str(options.port)
    for text in options.sets:
        where, field_name, value = _parse_set(text)
        hit = [name for name, role in targets.items() if where in (name, role, "common")]
        hit = [name for name in hit if where != "common" or field_name in ROLES[targets[name]].model_fields]
        if not hit:
            known = ", ".join(dict.fromkeys(["common", *targets.values(), *targets]))
            raise LaunchError(f"--set {text}: no {where!r} here, or none that has {field_name!r}; there are {known}")
        for name in hit:
            chosen[name][field_name] = value
    return chosen


def own_nats(url: str = "nats://127.0.0.1:4222") -> dict[str, str]:
    """The launcher's nats-server for all; what the environment says of another one does not concern it."""
    return dict.fromkeys(NatsSettings.model_fields, "none") | {"nats_url": url}


def plan_processes(
    options: UpOptions,
    chosen: Mapping[str, Mapping[str, str]],
    given: Mapping[str, str],
    command: Command = python_module,
) -> list[ProcessSpec]:
    """Every process with all of its settings. given: what the launcher decides for all (nats_url, directories …).

    Raises LaunchError where a process would refuse its settings, so that nothing is started in vain.
    """
    _check_together(options, chosen, given)
    shares = dict(zip(_worker_names(options), share_cores(host_cores(), len(_worker_names(options))), strict=True))
    threads: dict[str, int] = {}
    specs = []
    for name, role in process_names(options):
        values = _fitting(role, given) | _own_place(role, name, given) | dict(chosen[name]) | {"name": name}
        try:
            settings = load_settings(ROLES[role], values)
            if isinstance(settings, WorkerSettings):
                threads[name] = settings.threads or shares[name]
                values["threads"] = str(threads[name])
            env = _variables(role, values)
            if role in _SIDECAR_ROLES:
                sidecar = _fitting("sidecar", given) | dict(chosen["sidecar"])
                load_settings(ROLES["sidecar"], sidecar)
                env |= _variables("sidecar", sidecar)
        except ConfigError as error:
            raise LaunchError(str(error)) from error
        specs.append(ProcessSpec(name, role, command(role), env, settings.shutdown_timeout_s + 5.0))
    chosen_otherwise = "GOMP_SPINCOUNT" in os.environ or os.environ.get("OMP_WAIT_POLICY", "PASSIVE") != "PASSIVE"
    if sum(threads.values()) > host_cores() or chosen_otherwise:
        return specs
    return [replace(spec, env={**spec.env, **_SPINS}) if threads.get(spec.name, 1) > 1 else spec for spec in specs]


def _check_together(options: UpOptions, chosen: Mapping[str, Mapping[str, str]], given: Mapping[str, str]) -> None:
    """A worker that reports more rarely than the gateway expects would be taken for lost again and again. One that
    computes in another mode would spoil whatever is measured."""
    try:
        for gateway_name in gateway_names(options):
            gateway = load_settings(GatewaySettings, _fitting("gateway", given) | dict(chosen[gateway_name]))
            for name in _worker_names(options):
                role = name.partition("-")[0]
                _check_pair(name, load_settings(ROLES[role], _fitting(role, given) | dict(chosen[name])), gateway)
    except ConfigError as error:
        raise LaunchError(str(error)) from error


def _check_pair(name: str, worker: CommonSettings, gateway: GatewaySettings) -> None:
    if isinstance(worker, WorkerSettings) and worker.mode != gateway.mode:
        raise LaunchError(f"{name} would run in mode {worker.mode}, the gateway in mode {gateway.mode}")
    if gateway.worker_timeout_s <= 2 * worker.heartbeat_s:
        raise LaunchError(
            f"{name}: heartbeat_s ({worker.heartbeat_s:g}) must be below half of the gateway's worker_timeout_s "
            f"({gateway.worker_timeout_s:g}), or it is taken for lost between two reports"
        )


def share_cores(cores: int, workers: int) -> list[int]:
    """Threads of each worker: all cores shared out, at least one each, the rest to the first."""
    if workers == 0:
        return []
    return [max(1, cores // workers + (1 if k < cores % workers else 0)) for k in range(workers)]


def _worker_names(options: UpOptions) -> list[str]:
    return [name for name, role in process_names(options) if role in WORKER_ROLES]


def _own_place(role: str, name: str, given: Mapping[str, str]) -> dict[str, str]:
    """Several kvstores of one cluster share a state directory, and no two of them a directory of blocks."""
    if role != "kvstore" or name == role or "state_dir" not in given:
        return {}
    return {"driver_where": str(Path(given["state_dir"]) / f"blocks-{name}")}


def _fitting(role: str, values: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in values.items() if key in ROLES[role].model_fields}


def _variables(role: str, values: Mapping[str, str]) -> dict[str, str]:
    return {f"{PREFIX}{role}_{key}".upper(): value for key, value in values.items()}


def _parse_set(text: str) -> tuple[str, str, str]:
    where, dot, rest = text.partition(".")
    field_name, equals, value = rest.partition("=")
    if not (where and dot and field_name and equals):
        raise LaunchError(f"--set {text}: write role.field=value, as in --set decode.num_pages=2048")
    return where, field_name.replace("-", "_"), value
