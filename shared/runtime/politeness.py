"""How a sidecar keeps out of the way of what is more urgent: of whoever computes on the same cores, and of hand-offs on
the same link."""

from typing import Annotated, Self

from pydantic import ByteSize, Field, model_validator
from pydantic_settings import BaseSettings

from shared.runtime.bursts import polite_burst
from shared.runtime.placement import Placement

_LEAST_BURST, _LONGEST_BURST = 1 << 12, 1 << 26
_BURSTS_A_STALL = 16
"""Over shared memory eight bursts go at once."""


class PolitenessSettings(BaseSettings):
    """Part of a sidecar's settings."""

    niceness: Annotated[int, Field(ge=0, le=19)] = Field(
        10, description="how far the threads that move bytes step back for who computes on the same cores; 19: most"
    )
    cores: str = Field("", description="cores it runs on, as in 0,4-7. Default: its worker's")
    numa_node: Annotated[int, Field(ge=0)] | None = Field(
        None, description="it runs on this node's cores and takes its own memory there"
    )
    traffic_classes: bool = Field(True, description="false: background is as urgent as hand-offs, for comparison")
    burst_bytes: ByteSize = Field(
        ByteSize(4 << 20), description="most that is sent before something more urgent has its turn, as in 1MiB"
    )
    background_bytes_per_s: ByteSize | None = Field(
        None, description="most that background sends to one peer in a second, as in 20MB. Default: no cap"
    )
    background_window_bytes: ByteSize = Field(
        ByteSize(128 << 10), description="most that background has on its way to one peer over tcp; 0: no limit"
    )
    stall_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        15.0, description="a transfer that stands still for so long fails"
    )

    @property
    def placement(self) -> Placement:
        return Placement.of(self.niceness, self.cores, self.numa_node)

    @property
    def _polite_burst_bytes(self) -> int:
        """As the sidecar's gate has it."""
        burst_bytes, window_bytes = int(self.burst_bytes), int(self.background_window_bytes)
        return polite_burst(burst_bytes, window_bytes if self.traffic_classes else 0)

    @model_validator(mode="after")
    def _can_be_polite(self) -> Self:
        Placement.of(self.niceness, self.cores, self.numa_node)
        if not _LEAST_BURST <= self.burst_bytes <= _LONGEST_BURST:
            raise ValueError(f"burst_bytes ({self.burst_bytes}) must be between 4KiB and 64MiB")
        rate, burst_bytes = self.background_bytes_per_s, self._polite_burst_bytes
        if rate is not None and rate * self.stall_timeout_s < _BURSTS_A_STALL * burst_bytes:
            raise ValueError(
                f"background_bytes_per_s ({rate}) is so low that its bursts of {burst_bytes} bytes would come too "
                f"rarely for stall_timeout_s ({self.stall_timeout_s:g}): raise it, or lower burst_bytes or "
                "background_window_bytes"
            )
        return self
