"""`baton up` over stand-ins: the launcher is the real one. Takes the flags of `baton up`."""

import sys
from pathlib import Path

from services import cli
from services.launcher import up as launcher

WORKER = Path(__file__).with_name("standin_worker.py")
real_up = launcher.up


def up(options, console):
    real_up(options, console, lambda role: (sys.executable, str(WORKER), role), prepare_model=False)


launcher.up = up
cli.main()
