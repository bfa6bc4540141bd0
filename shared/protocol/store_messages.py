"""What workers and kvstores say to each other about blocks. As in `messages.py`: frozen, closed, versioned, idempotent,
repeated until answered; bytes of state never travel here.

A put is offer → (bytes, sidecar to sidecar) → stored; a read is lookup → load (bytes into a ticket that the reader
opened) → lease with nothing remaining. The asking side makes the room (or the lease's name) before it asks, so that
asking again is the same question.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator

from shared.protocol.messages import CommitStatus, ComponentDigest, OnWire, TicketMessage
from shared.protocol.packing import PackedBytes, PackedInts, pack_bytes, unpack_bytes
from shared.protocol.reports import LinkAddress
from shared.protocol.wire import Code, FormatName, Index, Note, PeerName, Priority, Room, Seconds, Secret, WireModel

KEY_BYTES = 16
MAX_KEYS = 8192
"""Of one message: 128 KiB of keys, half a million tokens in blocks of 64. Who has more asks in parts."""
_MAX_LAYERS = 1024

Tenant = Annotated[str, Field(max_length=200)]
BlockTokens = Annotated[int, Field(ge=1, le=1 << 16)]


def _pack_keys(keys: tuple[bytes, ...]) -> str:
    return pack_bytes(b"".join(keys))


def _unpack_keys(value: Any) -> tuple[bytes, ...]:
    """Accepts the packed form or a sequence of keys."""
    if isinstance(value, list | tuple):
        keys = tuple(value)
        if not all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in keys):
            raise ValueError(f"each key is {KEY_BYTES} bytes")
    else:
        raw = unpack_bytes(value)
        if len(raw) % KEY_BYTES:
            raise ValueError(f"not a whole number of keys of {KEY_BYTES} bytes")
        keys = tuple(raw[k : k + KEY_BYTES] for k in range(0, len(raw), KEY_BYTES))
    if len(keys) > MAX_KEYS:
        raise ValueError(f"{len(keys)} keys, at most {MAX_KEYS}")
    if len(set(keys)) < len(keys):
        raise ValueError("a key is named twice")
    return keys


PackedKeys = Annotated[
    tuple[bytes, ...], PlainValidator(_unpack_keys), PlainSerializer(_pack_keys, return_type=str, when_used="json")
]
"""Keys of 16 bytes each, one after the other in base64."""


def _key_or_nothing(value: bytes) -> bytes:
    if len(value) not in (0, KEY_BYTES):
        raise ValueError(f"a key is {KEY_BYTES} bytes")
    return value


Parent = Annotated[PackedBytes, AfterValidator(_key_or_nothing)]


class ComponentSpec(WireModel):
    """A state component as `shared/state/components.py` has it, uncut."""

    name: Annotated[str, Field(max_length=64)]
    index: Literal["page", "request", "ring"]
    unit_tokens: Annotated[int, Field(ge=1)]
    outer: Annotated[tuple[int, ...], Field(max_length=8)]
    inner: Annotated[tuple[int, ...], Field(max_length=8)]
    dtype: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,16}$")]
    layers: Annotated[tuple[Index, ...], Field(min_length=1, max_length=_MAX_LAYERS)]
    shard_axis: Index | None = None


class NamespaceSpec(WireModel):
    """Whose state it is and how blocks of it are cut: blocks of one namespace lie in one pool, those of two never mix.
    Pages have `block_tokens` here, whatever those of the worker that says it."""

    identity: Annotated[str, Field(max_length=200)]
    block_tokens: BlockTokens
    components: Annotated[tuple[ComponentSpec, ...], Field(min_length=1, max_length=32)]


class Offer(TicketMessage):
    """Worker to kvstore: I have these blocks, the k-th the parent of the next. parent: of the first one; empty where
    that is the chain's root. first_block: how many blocks of the chain come before the first one."""

    kind: Literal["offer"] = "offer"
    v: Literal[1] = 1
    worker: PeerName
    tenant: Tenant = ""
    namespace: NamespaceSpec
    parent: Parent = b""
    first_block: Index = 0
    keys: PackedKeys
    pin_s: Seconds = 0.0
    """So long they are evicted only where nothing else is left that could be."""
    remaining_s: Seconds


class OfferStatus(StrEnum):
    """GRANTED: send what is wanted. NOTHING: nothing is wanted. ORPHAN: nor is it, because the parent is not there; a
    chain is stored from its root on. REFUSED: see the code."""

    GRANTED = "granted"
    NOTHING = "nothing"
    ORPHAN = "orphan"
    REFUSED = "refused"


class OfferReply(WireModel):
    """wanted: which of the offered keys, by their places, rising. The ticket's logical unit k is the k-th wanted block.
    held: how many leading keys are there for readers already."""

    kind: Literal["offer_reply"] = "offer_reply"
    v: Literal[1] = 1
    status: OfferStatus
    wanted: PackedInts = ()
    held: Index = 0
    link: LinkAddress | None = None
    secret: Secret = b""
    remaining_s: Seconds = 0.0
    """Until then all must be there and said to be."""
    code: Code = ""
    message: Note = ""


class Stored(TicketMessage):
    """Worker to kvstore: all of the wanted blocks were sent. It asks again while that is *pending*."""

    kind: Literal["stored"] = "stored"
    v: Literal[1] = 1
    components: tuple[ComponentDigest, ...]


class StoredReply(WireModel):
    """committed: readers see the blocks, all of them."""

    kind: Literal["stored_reply"] = "stored_reply"
    v: Literal[1] = 1
    status: CommitStatus
    code: Code = ""
    message: Note = ""


class Lookup(WireModel):
    """To a kvstore: how many of these leading blocks of a chain do you have? What is found is leased under this name:
    it stays there for `remaining_s`. first_block: as in an offer."""

    kind: Literal["lookup"] = "lookup"
    v: Literal[1] = 1
    lease: Room
    namespace: NamespaceSpec
    first_block: Index = 0
    keys: PackedKeys
    pin_s: Seconds = 0.0
    remaining_s: Seconds


class LookupReply(WireModel):
    """num_blocks: leading ones that are there; 0: nothing is leased. beneath: which of them, by their places, are not
    in memory and would have to be read first."""

    kind: Literal["lookup_reply"] = "lookup_reply"
    v: Literal[1] = 1
    num_blocks: Index
    num_bytes: Index = 0
    beneath: PackedInts = ()
    code: Code = ""
    message: Note = ""


class Load(TicketMessage):
    """To a kvstore: send the first `num_blocks` of a lease into this ticket, which is open at the sidecar `link`.
    first_token: position in the ticket of the first token of the first one; a multiple of the block's length."""

    kind: Literal["load"] = "load"
    v: Literal[1] = 1
    lease: Room
    num_blocks: Annotated[int, Field(ge=1, le=MAX_KEYS)]
    first_token: Index = 0
    link: LinkAddress
    secret: Secret
    wire_format: FormatName = "raw"
    priority: Priority = 0
    remaining_s: Seconds


class LoadStatus(StrEnum):
    """DONE: sent, and confirmed by the other sidecar. PENDING: ask again. FAILED: what has come is not to be used."""

    DONE = "done"
    PENDING = "pending"
    FAILED = "failed"


class LoadReply(WireModel):
    """num_blocks: leading ones that were sent; fewer than asked for where the next one was damaged or could not be
    read. components: what was sent, counted and digested as in a commit."""

    kind: Literal["load_reply"] = "load_reply"
    v: Literal[1] = 1
    status: LoadStatus
    num_blocks: Index = 0
    components: tuple[ComponentDigest, ...] = ()
    on_wire: tuple[OnWire, ...] = ()
    backend: str | None = None
    code: Code = ""
    message: Note = ""


class Lease(WireModel):
    """To a kvstore: the lease holds for `remaining_s` from now on; 0: it is over. Answered with a verdict: no where
    there is no such lease any more."""

    kind: Literal["lease"] = "lease"
    v: Literal[1] = 1
    lease: Room
    remaining_s: Seconds
