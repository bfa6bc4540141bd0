"""A process of a cluster without a model: reports, answers /health, and starts a child as a worker starts its sidecar.

`python standin_worker.py ROLE`; STANDIN_BREAKS=NAME makes the process of that name end with status 3 at its start, and
STANDIN_WAITS=NAME makes that one never ready.
"""

import asyncio
import os
import subprocess
import sys

from aiohttp import web

from shared.runtime.process import main
from shared.runtime.service import Service
from shared.runtime.settings import ROLES, CommonSettings, GatewaySettings


class StandIn(Service):
    serves_http = False

    async def start(self) -> None:
        name = self.base_settings.name
        if os.environ.get("STANDIN_BREAKS") == name:
            print(f"{name} cannot do this", flush=True)
            os._exit(3)
        self.children = []
        if os.environ.get("STANDIN_WAITS") == name:
            await asyncio.Event().wait()
        if self.role in ("prefill", "decode"):
            self.children.append(subprocess.Popen(["sleep", "1000"]))
        if isinstance(self.base_settings, GatewaySettings):
            app = web.Application()
            self.add_probes(app)
            self.front = web.AppRunner(app, access_log=None)
            await self.front.setup()
            await web.TCPSite(self.front, self.base_settings.host, self.base_settings.port).start()
        print(f"threads={getattr(self.base_settings, 'threads', None)} boot={self.boot_id}", flush=True)

    async def stop(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
        if isinstance(self.base_settings, GatewaySettings):
            await self.front.cleanup()
        print("stopped in order", flush=True)


def build(settings: CommonSettings) -> Service:
    return type("StandIn", (StandIn,), {"role": type(settings).role})(settings)


if __name__ == "__main__":
    role = sys.argv.pop(1)
    main(ROLES[role], build)
