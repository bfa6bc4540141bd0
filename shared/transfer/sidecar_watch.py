"""How long a sidecar may be silent: asked in several attempts, it answers, is dead already, or is killed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shared.runtime.errors import PeerLost
from shared.transfer.sidecar_process import SidecarProcess

_log = logging.getLogger(__name__)
_ATTEMPTS = 4


async def watch(child: SidecarProcess, ping_interval_s: float, hang_timeout_s: float) -> None:
    """Returns when `child` is gone; kills it if it hangs."""
    while not child.gone.is_set():
        try:
            async with asyncio.timeout(ping_interval_s):
                await child.gone.wait()
        except TimeoutError:
            try:
                await _patiently(child.ping, hang_timeout_s)
            except TimeoutError:
                _log.error("the sidecar %d hangs: it is killed", child.pid)
                child.kill()
            except PeerLost:
                await child.gone.wait()


async def until_done(child: SidecarProcess, what: str, ask: Callable[[], Awaitable[object]], timeout_s: float) -> None:
    """Returns when the sidecar says it is done, or is dead."""
    try:
        await _patiently(ask, timeout_s)
    except (TimeoutError, PeerLost) as error:
        if isinstance(error, TimeoutError):
            _log.error("the sidecar %d did not answer %s: it is killed", child.pid, what)
        child.kill()
        await child.gone.wait()


async def _patiently(ask: Callable[[], Awaitable[object]], timeout_s: float) -> None:
    """Asks until it is answered; TimeoutError after `timeout_s`. In several attempts, because one time limit that
    passed may mean that our own process stood still, and then it is not the sidecar that hangs."""
    for attempt in range(_ATTEMPTS):
        try:
            async with asyncio.timeout(timeout_s / _ATTEMPTS):
                await ask()
                return
        except TimeoutError:
            if attempt == _ATTEMPTS - 1:
                raise
