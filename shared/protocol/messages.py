"""What goes over NATS. Frozen, closed (an unknown field is an error) and versioned; the golden files in
`tests/unit/protocol/golden` make every change of the wire visible.

Every message of a request carries `room` and `generation`: the ticket. Time on the wire is `remaining_s`, never a
clock reading. KV bytes never travel here.
"""

from enum import StrEnum
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from shared.protocol.packing import PackedBytes, PackedInts

Room = Annotated[int, Field(gt=0, lt=1 << 63)]
Generation = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PeerName = Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,64}$")]
"""Becomes part of a subject, so nothing else may be in it."""
Index = Annotated[int, Field(ge=0)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
"""Of a request: the smaller the number, the sooner its turn."""
TokenId = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
MAX_CHOICES = 128
MAX_ROLL_CALL = 1024
_MAX_NOTE_LEN = 1000
Note = Annotated[str, AfterValidator(lambda text: text[:_MAX_NOTE_LEN])]
"""Words for people. Cut short, because receivers keep them with the memory of ended tickets."""
Leg = Annotated[str, Field(pattern=r"^(|prefill|decode|gateway|link)$")]
Code = Annotated[str, Field(pattern=r"^[a-z_]{0,40}$")]
Secret = Annotated[PackedBytes, Field(max_length=64)]
FormatName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,16}$")]
KvPrecision = Literal["lossless", "raw", "fp16", "fp8", "int8", "delta", "auto"]
"""How a request's state may travel: in this format or, where that is not to be had, in an exact one. `auto`: in
whatever format pays."""


class WireModel(BaseModel):
    # A log probability may be -inf, which the default would write as null and no peer could read.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class SamplingSpec(WireModel):
    """How tokens are chosen. The randomness of choice c at position p depends on (seed, c, p) alone."""

    seed: Annotated[int, Field(ge=0, lt=1 << 64)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[int, Field(ge=1)] = 16
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    logit_bias: tuple[tuple[TokenId, Finite], ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """None: no logprobs. k: the chosen token's and those of the k best."""


class TokenLogprob(WireModel):
    """log softmax of the raw logits, before temperature, penalties and bias."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(StrEnum):
    """Why a choice ended of itself. An error is never one of these."""

    STOP = "stop"
    LENGTH = "length"


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


class TicketMessage(WireModel):
    room: Room
    generation: Generation


class Reserve(TicketMessage):
    """Gateway to D: take pages for this prompt and its first decode steps, all or nothing."""

    kind: Literal["reserve"] = "reserve"
    v: Literal[1] = 1
    request_id: str
    gateway: PeerName
    prefill: PeerName | None
    """The P that will send the state; None: D computes the prompt itself (path=local)."""
    identity: str
    prompt: PackedInts
    sampling: SamplingSpec
    remaining_s: Seconds
    waited_s: Seconds = 0.0
    """How old the request is: who has waited longest comes first, among those of its priority."""
    priority: Priority = 0
    kv_precision: KvPrecision = "lossless"
    history: Annotated[tuple[PackedInts, ...], Field(max_length=MAX_CHOICES)] = ()
    """Tokens each choice has given out already, the handoff token first; empty: a new request. D goes on after them and
    never samples them again."""
    finished: Annotated[tuple[Index, ...], Field(max_length=MAX_CHOICES)] = ()
    """Choices of `history` that are over; they are not continued."""


class Prefill(TicketMessage):
    """Gateway to P: compute this prompt for that ticket once D's destination is there."""

    kind: Literal["prefill"] = "prefill"
    v: Literal[1] = 1
    request_id: str
    gateway: PeerName
    decode: PeerName
    identity: str
    prompt: PackedInts
    sampling: SamplingSpec
    remaining_s: Seconds
    waited_s: Seconds = 0.0
    """How old the request is: who has waited longest comes first, among those of its priority."""
    priority: Priority = 0
    kv_precision: KvPrecision = "lossless"
    resumed: bool = False
    """The client has the first tokens already: D replays them, so P's own are not told to anybody and end nothing."""


class Verdict(WireModel):
    """The answer to reserve, prefill and cancel: yes, or the reason why not."""

    kind: Literal["verdict"] = "verdict"
    v: Literal[1] = 1
    ok: bool
    code: Code = ""
    message: Note = ""
    by: Leg = ""
    """Which leg is to blame for a no, where it is not the one that says it."""
    retry_after_s: Seconds | None = None


class Destination(TicketMessage):
    """D to P: where the state goes. Which physical pages is known to D's sidecar alone. held_len: so many positions of
    the prompt D has in its pages already; their rows are not sent."""

    kind: Literal["destination"] = "destination"
    v: Literal[1] = 1
    decode: PeerName
    identity: str
    geometry: Geometry
    link: LinkAddress
    secret: Secret
    held_len: Index = 0


class DestinationStatus(StrEnum):
    ACCEPTED = "accepted"
    UNKNOWN = "unknown"
    DEAD = "dead"
    REFUSED = "refused"


class DestinationReply(WireModel):
    kind: Literal["destination_reply"] = "destination_reply"
    v: Literal[1] = 1
    status: DestinationStatus
    code: Code = ""
    message: Note = ""


class FirstToken(WireModel):
    """The handoff token of one choice: sampled by P, has no KV yet. `finish` is set where it ends the choice."""

    choice: Index
    token: TokenId
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None


class ComponentDigest(WireModel):
    name: str
    num_bytes: Annotated[int, Field(ge=0)]
    digest: str


class OnWire(WireModel):
    """How the rows of one component travelled, and in how many bytes."""

    name: str
    wire_format: FormatName
    num_bytes: Annotated[int, Field(ge=0)]


def overlap_of(prefill_s: float, exposed_s: float, moved_s: float) -> float | None:
    """Overlap efficiency: which part of the transfer was hidden behind the compute, of what could have been."""
    could_s = min(moved_s, prefill_s)
    return max(0.0, 1.0 - exposed_s / could_s) if could_s > 0 else None


class PrefillTimings(WireModel):
    """Seconds as P saw them. transfer_s: from the end of the compute until all was confirmed (the *exposed* part);
    moved_s: while state was on its way."""

    queue_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    moved_s: Seconds = 0.0
    backend: str | None = None
    backend_asked: str | None = None
    """The setting `transfer` of P's sidecar."""

    @property
    def overlap(self) -> float | None:
        return overlap_of(self.prefill_s, self.transfer_s, self.moved_s)


class Commit(TicketMessage):
    """P to D: everything was sent. D takes over once its own counts and digests agree."""

    kind: Literal["commit"] = "commit"
    v: Literal[1] = 1
    prefill: PeerName
    prompt_len: Annotated[int, Field(ge=1)]
    first: tuple[FirstToken, ...]
    components: tuple[ComponentDigest, ...]
    wire_format: FormatName = "raw"
    """What ran, which need not be what was asked for."""
    on_wire: tuple[OnWire, ...] = ()
    timings: PrefillTimings = PrefillTimings()


class CommitStatus(StrEnum):
    COMMITTED = "committed"
    PENDING = "pending"
    DEAD = "dead"
    FAILED = "failed"


class CommitReply(WireModel):
    kind: Literal["commit_reply"] = "commit_reply"
    v: Literal[1] = 1
    status: CommitStatus
    code: Code = ""
    message: Note = ""


class TokenEntry(TicketMessage):
    """Tokens `index`, `index + 1` … of one choice."""

    choice: Index
    index: Index
    tokens: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None


class TicketTimings(WireModel):
    """Seconds and bytes of a ticket, as D (and, through the commit, P) saw them."""

    queue_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    moved_s: Seconds = 0.0
    commit_s: Seconds = 0.0
    bytes: tuple[tuple[str, int], ...] = ()
    wire_format: str | None = None
    wire_bytes: tuple[tuple[str, int], ...] = ()
    backend: str | None = None
    backend_asked: str | None = None


class Tokens(WireModel):
    """To a gateway: what a step produced for all of its requests. Repeats and overlaps are harmless: the gateway takes
    the next expected index only."""

    kind: Literal["tokens"] = "tokens"
    v: Literal[1] = 1
    sender: PeerName
    entries: tuple[TokenEntry, ...]
    timings: tuple[tuple[int, TicketTimings], ...] = ()
    """(room, timings), sent once with a ticket's first tokens."""


class Replay(TicketMessage):
    """Gateway to D: give me choice c from index k on, for each pair; also: is the ticket still alive?"""

    kind: Literal["replay"] = "replay"
    v: Literal[1] = 1
    wanted: Annotated[tuple[tuple[Index, Index], ...], Field(max_length=MAX_CHOICES)]


class ReplayStatus(StrEnum):
    LIVE = "live"
    ENDED = "ended"
    UNKNOWN = "unknown"


class ReplayReply(WireModel):
    kind: Literal["replay_reply"] = "replay_reply"
    v: Literal[1] = 1
    status: ReplayStatus
    entries: tuple[TokenEntry, ...] = ()
    code: Code = ""
    message: Note = ""
    by: Leg = ""
    """Why the ticket ended, where it did not finish and this is still known."""


class Cancel(TicketMessage):
    """End the ticket, or one choice of it. Of an unknown ticket it leaves a tombstone."""

    kind: Literal["cancel"] = "cancel"
    v: Literal[1] = 1
    reason: Note
    choice: Index | None = None


class Fail(TicketMessage):
    """A leg failed; the first cause is kept and reaches the client."""

    kind: Literal["fail"] = "fail"
    v: Literal[1] = 1
    sender: PeerName
    code: Code
    message: Note
    by: Leg = ""
    """Which leg is to blame; empty: nobody knows."""


class Ping(WireModel):
    """Gateway to a worker that works for it. It is answered; that nobody listens there any more is known at once."""

    kind: Literal["ping"] = "ping"
    v: Literal[1] = 1


class RollCall(WireModel):
    """Worker to gateway: which of these rooms do you not know? A room is opened before anybody hears of it and never
    used again, so one that is unknown is over."""

    kind: Literal["roll_call"] = "roll_call"
    v: Literal[1] = 1
    sender: PeerName
    rooms: Annotated[tuple[Room, ...], Field(max_length=MAX_ROLL_CALL)]


class RollCallReply(WireModel):
    kind: Literal["roll_call_reply"] = "roll_call_reply"
    v: Literal[1] = 1
    gone: tuple[Room, ...]


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
    queues: dict[str, int] = {}
    tickets: dict[str, int] = {}
    stashed_bytes: int = 0
    """Host memory that holds the state of requests that gave their pages up, now."""
    counters: dict[str, float] = {}
    settings: dict[str, str | int | float | bool | None] = {}
    sequence: int = 0
    """Rises by one with each report of a boot, so that a late one never overwrites a newer one."""

    @property
    def peer(self) -> str:
        return f"{self.id}-{self.boot_id}"


M = TypeVar("M", bound=WireModel)


class MalformedMessage(ValueError):
    """Bytes from the bus that are not a message of the expected kind."""


def encode(message: WireModel) -> bytes:
    return message.model_dump_json(exclude_defaults=False).encode()


def decode(kind: type[M], data: bytes) -> M:
    """The message in `data`, or MalformedMessage. Never raises anything else."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedMessage(f"{kind.__name__}: {where}: {first['msg']}") from error
