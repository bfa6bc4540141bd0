"""What a worker says to the sidecar that it starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """How the worker wants its sidecar.

    name: of the sidecar in reports. ipc_dir: directory of the sockets by which sidecars of one host find each other.
    nats: how it reaches nats-server, as its environment; empty: it sends no reports. transfer: `auto` (shm where the
    peer is on this host, else tcp), or backends by name, the preferred first. tcp_host: what peers are told and, unless
    listen_host says otherwise, where to listen. What is None is left to the sidecar's own settings. arguments: further
    flags of `python -m services.sidecar`.
    """

    name: str
    ipc_dir: Path
    nats: Mapping[str, str] = field(default_factory=dict)
    transfer: str | None = None
    tcp_host: str | None = None
    tcp_port: int | None = None
    nixl_port: int | None = None
    listen_host: str | None = None
    arguments: tuple[str, ...] = ()
    start_timeout_s: float = 60.0
    fence_timeout_s: float = 5.0
    """A sidecar that does not answer fence or forget within this is killed: its death is the proof."""
    ping_interval_s: float = 1.0
    hang_timeout_s: float = 10.0

    def flags(self) -> tuple[str, ...]:
        pairs = {
            "--name": self.name,
            "--ipc-dir": self.ipc_dir,
            "--nats-url": None if self.nats else "",
            "--transfer": self.transfer,
            "--tcp-host": self.tcp_host,
            "--tcp-port": self.tcp_port,
            "--nixl-port": self.nixl_port,
            "--listen-host": self.listen_host,
        }
        given = [part for flag, value in pairs.items() if value is not None for part in (flag, str(value))]
        return (*given, *self.arguments)

    def environment(self) -> dict[str, str]:
        """Settings that are not for flags, which every list of processes shows."""
        return dict(self.nats)
