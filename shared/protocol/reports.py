"""What a process says of itself: where its sidecar is, how its state is cut, and its heartbeat."""

from typing import Annotated, Literal

from pydantic import Field

from shared.protocol.wire import FormatName, WireModel


class LinkAddress(WireModel):
    """Where a worker's sidecar is reached. A sidecar that restarts has a new boot id."""

    boot_id: str
    host: str
    port: Annotated[int, Field(ge=0, le=65535)]
    socket: str
    """Name of its socket in the IPC directory; peers that can open it are on the same host."""
    backends: tuple[str, ...]
    formats: Annotated[tuple[FormatName, ...], Field(max_length=32)] = ("raw",)
    """Wire formats it can write and read."""
    endpoints: tuple[tuple[str, str], ...] = ()
    """(backend, what it needs beyond host, port and socket to be reached), for those that do."""
    asked: str = "auto"
    """The setting `transfer` that `backends` come from."""

    def endpoint(self, backend: str) -> str:
        return dict(self.endpoints).get(backend, "")


class Geometry(WireModel):
    """What may differ between two workers of one identity and is converted. unit_bytes: of the first of `tp_size`
    ranks that share the state."""

    page_tokens: Annotated[int, Field(ge=1)]
    components: tuple[str, ...]
    unit_bytes: tuple[int, ...]
    tp_size: Annotated[int, Field(ge=1)] = 1


class Pages(WireModel):
    total: int
    free: int
    quarantined: int = 0
    in_tickets: int = 0
    yieldable: int = 0
    """Held by prompts that P computed ahead, which give them up for a new one. Part of `in_tickets`."""


class WorkerReport(WireModel):
    """A heartbeat: what a process is, and what it has right now."""

    kind: Literal["heartbeat"] = "heartbeat"
    v: Literal[1] = 1
    role: Literal["gateway", "prefill", "decode", "sidecar", "kvstore"]
    id: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")]
    boot_id: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,23}$")]
    pid: int
    host: str
    http_port: int = 0
    state: Literal["starting", "ready", "draining"] = "starting"
    model: str | None = None
    identity: str | None = None
    geometry: Geometry | None = None
    link: LinkAddress | None = None
    max_model_len: int | None = None
    pages: Pages | None = None
    slots: Pages | None = None
    queues: dict[str, int] = Field(default_factory=dict)
    tickets: dict[str, int] = Field(default_factory=dict)
    block_tokens: int | None = None
    """Of a worker: it finds the state of earlier prompts again in whole blocks of so many tokens. None: it does not."""
    stashed_bytes: int = 0
    """Host memory that holds the state of requests that gave their pages up, now."""
    counters: dict[str, float] = Field(default_factory=dict)
    settings: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    durability: str = ""
    """Of a kvstore: what of its blocks survives what, in words."""
    sequence: int = 0
    """Rises by one with each report of a boot, so that a late one never overwrites a newer one."""

    @property
    def peer(self) -> str:
        return f"{self.id}-{self.boot_id}"
