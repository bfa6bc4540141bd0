"""What a setting says about a driver, the same for all of them; each takes from it what it knows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """where: a directory for `disk`, a URL for those that talk to a server, nothing for `memory`. limit_bytes: what
    blocks may take in all. fsync: `disk` returns from a put only when the device has it."""

    where: str = ""
    limit_bytes: int | None = None
    fsync: bool = True
