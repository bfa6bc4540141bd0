"""Resumable streams: what gateways say to each other about one, and what each writes down of it for the next.

The journal's entries are read by other processes, and so are part of the wire. A stream has one `StreamRequest`, which
never changes; a `StreamState`, of which each version replaces the one before; and a `StreamPart` for each run of tokens
that has become too long to be written again with every batch. Choice c of prompt p is choice `p * n + c` everywhere.
"""

from typing import Annotated, Literal

from pydantic import Field

from shared.protocol.messages import FinishReason, SamplingSpec, TokenLogprob
from shared.protocol.packing import PackedInts
from shared.protocol.wire import (
    Code,
    Generation,
    Index,
    KvPrecision,
    Note,
    PeerName,
    Priority,
    Room,
    Seconds,
    WireModel,
)

StreamId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
MAX_STREAM_CHOICES = 4096


class HandOver(WireModel):
    """Gateway to the gateway that owns a stream: its client has come to me; let go of it. The answer is a `Verdict`:
    yes, once nothing more of it is written or sent there."""

    kind: Literal["hand_over"] = "hand_over"
    v: Literal[1] = 1
    stream: StreamId
    gateway: PeerName


class StreamPrompt(WireModel):
    """One prompt and how it is answered. echo: what its choices begin with."""

    prompt: PackedInts
    sampling: SamplingSpec
    echo: str = ""


class StreamRequest(WireModel):
    """Everything another gateway needs to answer in this one's place, and in the same shape. key: digest of the API
    key that may ask for it; empty: there are no keys. created: seconds since 1970, as the client was told."""

    kind: Literal["stream_request"] = "stream_request"
    v: Literal[1] = 1
    request_id: str
    key: str = ""
    tenant: str
    chat: bool
    model: str
    created: int
    prompts: Annotated[tuple[StreamPrompt, ...], Field(min_length=1)]
    n: Annotated[int, Field(ge=1)]
    stops: tuple[str, ...] = ()
    include_usage: bool = False
    timings: bool = False
    token_ids: bool = False
    tell_baton: bool = False
    path: Literal["auto", "remote", "local", "hybrid"] = "auto"
    strict: bool = False
    kv_precision: KvPrecision = "lossless"
    priority: Priority = 0
    cache_salt: str = ""


class StreamTokens(WireModel):
    """The next tokens of one choice. finish: of its last token; stopped: a stop string ended it behind them."""

    tokens: PackedInts = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stopped: bool = False


class StreamPart(WireModel):
    """A run of tokens that has its place for good."""

    kind: Literal["stream_part"] = "stream_part"
    v: Literal[1] = 1
    choices: Annotated[tuple[StreamTokens, ...], Field(max_length=MAX_STREAM_CHOICES)]


class StreamTicket(WireModel):
    """Who serves a prompt now, so that another gateway can go on with it."""

    room: Room
    generation: Generation
    decode: PeerName


class StreamProgress(WireModel):
    """Of one prompt. identity: of the model that answers; no other may go on. stored: positions whose state the stores
    can bring back. cached_tokens: of the prompt, once it has begun. timings: the JSON of `baton.timings`, once all of
    its choices have ended."""

    identity: str | None = None
    path: str = "pending"
    stored: Index = 0
    ticket: StreamTicket | None = None
    cached_tokens: Index | None = None
    timings: str | None = None


class StreamFailure(WireModel):
    """Why the stream ended before its answer did."""

    code: Code
    message: Note


class StreamState(WireModel):
    """owner: the gateway that serves it; nobody else may write or send. parts: the runs of tokens that come before
    those in `choices`, by their names. remaining_s: until the request's deadline."""

    kind: Literal["stream_state"] = "stream_state"
    v: Literal[1] = 1
    owner: PeerName
    parts: tuple[str, ...] = ()
    choices: Annotated[tuple[StreamTokens, ...], Field(max_length=MAX_STREAM_CHOICES)]
    progress: tuple[StreamProgress, ...]
    remaining_s: Seconds
    failure: StreamFailure | None = None

    @property
    def ended(self) -> bool:
        return self.failure is not None or all(one.timings is not None for one in self.progress)
