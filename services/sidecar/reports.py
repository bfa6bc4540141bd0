"""The sidecar's heartbeat. NATS may be away for as long as it likes: moving bytes does not need it."""

import asyncio
import logging
from collections.abc import Callable

from services.sidecar.settings import SidecarProcessSettings
from shared.bus.base import BusError
from shared.bus.nats import connect, options_from
from shared.protocol.reports import WorkerReport
from shared.runtime.clock import LoopClock
from shared.runtime.heartbeat import Heartbeat
from shared.runtime.ids import peer_name

_log = logging.getLogger(__name__)
_RETRY_S = 1.0


async def send_reports(settings: SidecarProcessSettings, boot_id: str, report: Callable[[], WorkerReport]) -> None:
    """Publishes reports until cancelled."""
    warned = False
    options = options_from(settings)
    while True:
        try:
            bus = await connect(settings.nats_url, peer_name(settings.name, boot_id), options)
        except (BusError, OSError) as error:
            if not warned:
                _log.warning("no reports: nats-server does not answer (%s); moving state needs none", error)
            warned = True
            await asyncio.sleep(_RETRY_S)
            continue
        try:
            await Heartbeat(bus, LoopClock(), report, settings.heartbeat_s).run()
        except BusError as error:
            _log.warning("reports ended: %s", error)
        finally:
            await bus.close()
        await asyncio.sleep(_RETRY_S)
