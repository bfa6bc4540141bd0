"""python -m services.sidecar --control-fd N: started by a worker, ends with it."""

import asyncio
import gc
import logging
import signal
import sys

from services.sidecar.server import run
from services.sidecar.settings import SidecarProcessSettings
from shared.runtime.config_file import EXIT_CONFIG
from shared.runtime.flags import parse_flags
from shared.runtime.settings import ConfigError, load_settings
from shared.runtime.telemetry import setup_logging

_SWITCH_INTERVAL_S = 0.0005
_GARBAGE_THRESHOLD = 20_000
"""A collection holds every transfer up, and there is next to no garbage."""


def main() -> None:
    try:
        settings = load_settings(SidecarProcessSettings, parse_flags(SidecarProcessSettings, sys.argv[1:]))
        settings.placement.apply()
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    setup_logging(settings.name, settings.log_level, settings.log_format)
    # A terminal's Ctrl-C reaches the whole group: the worker ends first, and this process with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    try:
        asyncio.run(run(settings))
    except ConfigError as error:
        logging.getLogger(__name__).critical("%s", error)
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
