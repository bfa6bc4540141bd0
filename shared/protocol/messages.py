"""What goes over NATS. Frozen, closed (an unknown field is an error) and versioned; the golden files in
`tests/unit/protocol/golden` make every change of the wire visible.

Every message of a request carries `room` and `generation`: the ticket. Time on the wire is `remaining_s`, never a
clock reading. KV bytes never travel here.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from shared.protocol.packing import PackedInts
from shared.protocol.reports import Geometry, LinkAddress
from shared.protocol.wire import (
    MAX_CHOICES,
    MAX_ROLL_CALL,
    Code,
    Finite,
    FormatName,
    Generation,
    Index,
    KvPrecision,
    Leg,
    Note,
    PeerName,
    Priority,
    Room,
    Salt,
    Seconds,
    Secret,
    TokenId,
    WireModel,
)


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
    salt: Salt = ""
    """Who may share state with this request; part of the name of every block of it."""
    orphan_grace_s: Seconds = 0.0
    """How long D goes on where the gateway is gone: another one may take the request up."""
    load: bool = False
    """D has the stores' blocks loaded. Without a P it computes what is missing; else P need not send what they have."""
    held_least: Index = 0
    """Where D's pages have fewer positions than that the ticket fails (`prefix_gone`): to compute so much here was not
    meant. Only where there is no P."""
    load_least: Index = 0
    """Where the stores bring fewer positions than that the ticket fails (`store_failed`): to compute so much here was
    not meant. Only where there is no P."""


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
    salt: Salt = ""
    """As in `Reserve`."""


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
    the prompt D has in its pages already; their rows are not sent, but for those that share a page of P's with rows
    that D lacks."""

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
    cached_tokens: Index = 0
    """Positions that P did not compute: its pages had them, or the stores brought them."""

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
    load_s: Seconds = 0.0
    """What D waited for the stores."""
    loaded_tokens: Index = 0
    """Positions whose state they brought."""
    loaded_bytes: Index = 0
    held_tokens: Index = 0
    """Positions whose state D's pages had: nobody sent them."""
    cached_tokens: Index = 0
    """Positions that nobody computed for this ticket."""


class Tokens(WireModel):
    """To a gateway: what a step produced for all of its requests. Repeats and overlaps are harmless: the gateway takes
    the next expected index only."""

    kind: Literal["tokens"] = "tokens"
    v: Literal[1] = 1
    sender: PeerName
    entries: tuple[TokenEntry, ...]
    timings: tuple[tuple[int, TicketTimings], ...] = ()
    """(room, timings), sent once with a ticket's first tokens."""
    stored: tuple[tuple[Room, Index], ...] = ()
    """(room, position): up to there the stores can bring a ticket's state back. Only ever rises."""


class Replay(TicketMessage):
    """Gateway to D: give me choice c from index k on, for each pair; also: is the ticket still alive?"""

    kind: Literal["replay"] = "replay"
    v: Literal[1] = 1
    wanted: Annotated[tuple[tuple[Index, Index], ...], Field(max_length=MAX_CHOICES)]
    gateway: PeerName | None = None
    """The ticket is this gateway's from now on, whoever's it was; None: nothing changes."""
    epoch: Index = 0
    """Of that gateway, among those that have had the ticket; an earlier one than the ticket's own changes nothing."""


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
    """End the ticket, or one choice of it. Of an unknown ticket it leaves a tombstone. epoch: under which the gateway
    has had it; where a later one has taken it over nothing ends."""

    kind: Literal["cancel"] = "cancel"
    v: Literal[1] = 1
    reason: Note
    choice: Index | None = None
    epoch: Index = 0


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
    used again, so one that is unknown is over. What was left for another gateway is known for a while."""

    kind: Literal["roll_call"] = "roll_call"
    v: Literal[1] = 1
    sender: PeerName
    rooms: Annotated[tuple[Room, ...], Field(max_length=MAX_ROLL_CALL)]


class RollCallReply(WireModel):
    kind: Literal["roll_call_reply"] = "roll_call_reply"
    v: Literal[1] = 1
    gone: tuple[Room, ...]
