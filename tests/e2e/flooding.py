"""A peer on the bus of a real cluster that hears everything and sends whatever it likes."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import nats
import psutil
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.protocol.reports import Geometry
from tests.support_cluster import RealCluster
from tests.support_noise import LISTENERS, Noise, Sent, Target

_BURST = 500


class FloodedCluster(RealCluster):
    """Its nats-server says what it has carried, and its processes' metrics are read from themselves."""

    entry = (str(Path(__file__).with_name("monitored_cluster.py")),)

    @property
    def nats_url(self) -> str:
        """With its password."""
        return (self.state_dir / "nats.url").read_text().strip()

    def start(self) -> None:
        super().start()
        self._ports = {role: self.workers(role)[0]["http_port"] for role in LISTENERS}
        self._direct = httpx.Client(timeout=60.0)

    def stop(self) -> None:
        self._direct.close()
        super().stop()

    def carried(self) -> dict[str, dict[str, Any]]:
        """What the server knows of each connection, by the client's name."""
        found = self._direct.get(f"{self._monitoring}/connz", params={"limit": 1024}).json()
        return {connection.get("name", ""): connection for connection in found["connections"]}

    def ended(self, peer: str) -> Counter[str]:
        """Connections of this client that are over, by why."""
        query = {"limit": 1024, "state": "closed"}
        found = self._direct.get(f"{self._monitoring}/connz", params=query).json()["connections"]
        return Counter(str(connection["reason"]) for connection in found if connection.get("name") == peer)

    def num_slow_consumers(self) -> int:
        return int(self._direct.get(f"{self._monitoring}/varz").json()["slow_consumers"])

    def metrics(self, role: str) -> Counter[str]:
        """The counters of the role's only process, as of now."""
        lines = self._direct.get(f"http://127.0.0.1:{self._ports[role]}/metrics").text.splitlines()
        pairs = [line.split() for line in lines if line.startswith("baton_") and "_total " in line and "{" not in line]
        return Counter({k.removeprefix("baton_").removesuffix("_total"): int(float(v)) for k, v in pairs})

    def memory(self) -> dict[str, int]:
        """Resident bytes of every process, by name."""
        pids = {worker["id"]: worker["pid"] for worker in self.workers() if not worker["id"].startswith("ghost")}
        pids["nats-server"] = self._nats_pid()
        return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}

    def target(self) -> Target:
        reports = {role: self.workers(role)[0] for role in LISTENERS}
        peers = {role: f"{report['id']}-{report['boot_id']}" for role, report in reports.items()}
        return Target(peers, reports["decode"]["identity"], Geometry(**reports["decode"]["geometry"]))

    @property
    def _monitoring(self) -> str:
        files = (self.state_dir / "nats").glob("*.ports")
        return str(json.loads(max(files, key=lambda path: path.stat().st_mtime).read_text())["monitoring"][0])


class Intruder:
    """`async with Intruder(cluster, seed) as intruder`. sent: messages so far. It reads, and writes, while the event
    loop runs: whoever waits for the cluster meanwhile does so in another thread."""

    def __init__(self, cluster: FloodedCluster, seed: int) -> None:
        self.noise = Noise(cluster.target(), seed)
        self.sent = 0
        self._url = cluster.nats_url
        self._client = Client()

    async def __aenter__(self) -> Self:
        self._client = await nats.connect(self._url, name="intruder", pending_size=8 << 20, no_echo=True)
        await self._client.subscribe("baton.v1.>", cb=self._overhear)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def flood(self, count: int, messages: Iterator[Sent] | None = None) -> None:
        """Sends `count` messages as fast as the cluster takes them: after each burst every process is asked something,
        and only their answers open the next one."""
        made, left = messages or self.noise.everything(), count
        while left > 0:
            burst = min(_BURST, left)
            for _ in range(burst):
                await self._client.publish(*next(made))
            left -= burst
            self.sent += burst
            for subject, data, _ in self.noise.questions():
                await self._client.request(subject, data, timeout=30)
                self.sent += 1

    async def publish(self, subject: str, data: bytes, reply: str) -> None:
        await self._client.publish(subject, data, reply)
        self.sent += 1

    async def flush(self) -> None:
        """Returns once the server has all of it: the gateway's answer comes behind that. (The ping of nats-py's own
        flush overtakes what is not written yet.)"""
        subject, data, _ = self.noise.questions()[-1]
        await self._client.request(subject, data, timeout=120)
        self.sent += 1

    async def _overhear(self, message: Msg) -> None:
        self.noise.overhear(message.subject, message.data, message.reply)
