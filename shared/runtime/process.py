"""The whole of a `__main__.py`: from flags and environment to the exit status."""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from shared.runtime.config_file import EXIT_CONFIG as EXIT_CONFIG
from shared.runtime.errors import BatonError
from shared.runtime.flags import parse_flags, unknown_variables
from shared.runtime.last_resort import exit_within
from shared.runtime.service import Service
from shared.runtime.settings import CommonSettings, ConfigError, load_settings
from shared.runtime.telemetry import setup_logging

log = logging.getLogger(__name__)

WORKER_SWITCH_INTERVAL_S = 0.0002
_LINGER_S = 3.0

C = TypeVar("C", bound=CommonSettings)


def main(settings_class: type[C], build: Callable[[C], Service], argv: Sequence[str] | None = None) -> None:
    """Settings, logging, the service, and the exit status: 0 after an ordered end, 78 for wrong settings, 1 for a
    failure. A thread that still prepares something is not waited for."""
    try:
        settings = load_settings(settings_class, parse_flags(settings_class, sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    if settings_class.role in ("prefill", "decode"):
        sys.setswitchinterval(WORKER_SWITCH_INTERVAL_S)
    sys.exit(asyncio.run(_run_to_status(build, settings)))


async def _run_to_status(build: Callable[[C], Service], settings: C) -> int:
    status = await _run_service(build, settings)
    exit_within(_LINGER_S, status)
    return status


async def _run_service(build: Callable[[C], Service], settings: C) -> int:
    setup_logging(settings.name, settings.log_level, settings.log_format)
    try:
        service = build(settings)
        setup_logging(service.peer, settings.log_level, settings.log_format)
        for line in unknown_variables():
            log.warning("%s", line)
        log.debug("settings: %s", " ".join(f"{key}={value}" for key, value in settings.public().items()))
        await service.run()
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    except Exception as error:
        for leaf in _leaves(error):
            log.critical("%s", leaf, exc_info=None if isinstance(leaf, BatonError | ConfigError) else leaf)
        return EXIT_CONFIG if any(isinstance(leaf, ConfigError) for leaf in _leaves(error)) else 1
    return 0


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
