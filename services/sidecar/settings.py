"""What a sidecar process is told by the worker that starts it."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from shared.runtime.settings import SidecarSettings
from shared.transfer.backend import Faults, Timing
from shared.transfer.classes import Rules
from shared.transfer.formats.catalog import offered
from shared.transfer.gate import Gate


class SidecarProcessSettings(SidecarSettings):
    """The process that moves one worker's bytes. The worker starts it and holds the other end of control_fd."""

    control_fd: Annotated[int, Field(ge=3)] = Field(description="connected unix socket to the worker")
    nats_url: str = Field("nats://127.0.0.1:4222", description="where nats-server listens; empty: no reports")

    @field_validator("wire_formats")
    @classmethod
    def _known_formats(cls, value: str) -> str:
        offered(value)
        return value

    @property
    def formats(self) -> tuple[str, ...]:
        return offered(self.wire_formats)

    @property
    def directory(self) -> Path:
        return self.ipc_dir or self.state_dir / "ipc"

    @property
    def timing(self) -> Timing:
        return Timing(connect_s=self.peer_timeout_s, stall_s=self.stall_timeout_s)

    def gate(self) -> Gate:
        """A new one."""
        rules = Rules(
            burst_bytes=int(self.burst_bytes),
            window_bytes=int(self.background_window_bytes) if self.traffic_classes else 0,
            background_bytes_per_s=None if self.background_bytes_per_s is None else float(self.background_bytes_per_s),
            classes=self.traffic_classes,
        )
        return Gate(rules)

    @property
    def injected(self) -> Faults:
        return Faults.parse(self.faults)
