"""Whether this machine can run a cluster: what is missing, and what to do about it."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from kernels.packing import VECTOR_FLAGS
from services.launcher.errors import LaunchError
from services.launcher.state_dir import free_port
from shared.bus.server import NatsServerError, find_nats_server
from shared.engine.weights.catalog import list_cached
from shared.runtime.cores import host_cores
from shared.runtime.settings import DEFAULT_MODEL, ConfigError, GatewaySettings, default_cache_dir, load_settings

_LEAST_MEMORY_BYTES = 4 << 30
_LEAST_DISK_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """ok False stands in the way of `baton up`; hint says what to do."""

    what: str
    ok: bool
    found: str
    hint: str = ""


def examine(console: Console, port: int) -> bool:
    """Prints one line for each check; whether all went well."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _cores,
        _memory,
        _disk,
        _nats,
        _torch,
        _processor,
        _model,
        _mode,
    )
    findings = [*(check() for check in checks), _port(port)]
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]no[/]"
        hint = f"  [yellow]{finding.hint}[/]" if finding.hint else ""
        console.print(f" {mark}  {finding.what:<12} {finding.found}{hint}", soft_wrap=True)
    return all(finding.ok for finding in findings)


def cache_dir() -> Path:
    """Where `baton up` would keep models; the default where a setting is wrong, which is another finding's business."""
    try:
        return load_settings(GatewaySettings).cache_dir
    except ConfigError:
        return default_cache_dir()


def _python() -> Finding:
    good = sys.version_info >= (3, 11) and sys.platform == "linux"
    hint = "" if good else "3.11 or later, on Linux"
    return Finding("Python", good, f"{platform.python_version()} on {sys.platform}", hint)


def _cores() -> Finding:
    return Finding("cores", True, f"{host_cores()}, shared out over the workers")


def _memory() -> Finding:
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            pages = int(line.split()[1]) << 10
    hint = "" if pages >= _LEAST_MEMORY_BYTES else "give less to the pools, as --set common.kv_bytes=128MiB"
    return Finding("memory", pages >= _LEAST_MEMORY_BYTES // 2, f"{pages / (1 << 30):.1f} GiB available", hint)


def _disk() -> Finding:
    place = cache_dir()
    while not place.exists():
        place = place.parent
    stat = os.statvfs(place)
    free = stat.f_bavail * stat.f_frsize
    hint = "" if free >= _LEAST_DISK_BYTES else "set BATON_CACHE_DIR to a place with 2 GiB"
    return Finding("disk", free >= _LEAST_DISK_BYTES, f"{free / (1 << 30):.1f} GiB free in {place}", hint)


def _nats() -> Finding:
    try:
        program = find_nats_server()
        done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (NatsServerError, OSError, subprocess.TimeoutExpired) as error:
        return Finding("nats-server", False, str(error), "make install")
    return Finding("nats-server", done.returncode == 0, f"{done.stdout.strip()} ({program})")


def _torch() -> Finding:
    there = find_spec("torch") is not None
    return Finding("torch", there, "installed" if there else "not installed", "" if there else "make install")


def _processor() -> Finding:
    """Nothing stands in the way: without them weights are unpacked, which is slow."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return Finding("processor", True, "what it can do is not known: there is no /proc/cpuinfo")
    missing = [name for name in VECTOR_FLAGS if name not in flags]
    if not missing:
        return Finding("processor", True, "weights in float16, int8 and int4 are fast")
    found = f"has no {', '.join(missing)}: weights in float16, int8 and int4 work, and are slow"
    return Finding("processor", True, found, "keep --weights float32")


def _model() -> Finding:
    ready = any(model.name == DEFAULT_MODEL for model in list_cached(cache_dir()))
    return Finding("model", True, f"{DEFAULT_MODEL} {'is ready' if ready else 'will be prepared by baton up'}")


def _mode() -> Finding:
    try:
        mode = load_settings(GatewaySettings).mode
    except ConfigError as error:
        return Finding("mode", False, str(error))
    return Finding("mode", True, f"{mode}{'' if mode == 'separated' else ': without prefill workers'}")


def _port(port: int) -> Finding:
    try:
        free_port("127.0.0.1", port)
    except LaunchError as error:
        return Finding("port", False, str(error))
    return Finding("port", True, f"{port} is free")
