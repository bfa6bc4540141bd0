"""The store of blocks. It has its place in the cluster already; what it stores comes with recovery and prefix reuse."""

import logging

from shared.runtime.service import Service

log = logging.getLogger(__name__)


class KvstoreService(Service):
    """Registers and answers /health and /metrics. It keeps no blocks yet, and its report says so."""

    role = "kvstore"

    async def start(self) -> None:
        log.debug("keeps no blocks yet: there is no reuse of prefixes and no recovery from the store in this version")
