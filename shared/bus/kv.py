"""A small key-value memory beside the bus: what must outlive the process that wrote it, and have one owner at a time.

NATS's JetStream is one (`nats_kv.py`), its in-memory twin another (`memory_kv.py`); both pass the same contract suite.
Every entry has a revision, and a write names the one it replaces: of two writers one is told so. An entry that nobody
writes for `ttl_s` is gone.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from shared.bus.base import MAX_PAYLOAD_BYTES, BusError

_BUCKET = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KEY = re.compile(r"[a-zA-Z0-9_-]{1,64}(\.[a-zA-Z0-9_-]{1,64}){0,3}")


class KvError(BusError):
    """The memory cannot do this."""


class NoKeyValue(KvError):
    """The bus has no such memory: a NATS server without JetStream."""


class BucketGone(KvError):
    """The bucket is there no more: its server lost it. Open it again."""


class KvConflict(KvError):
    """The entry is not at the revision that was to be replaced: somebody else wrote it, or it is gone."""


class KvFull(KvError):
    """The bucket holds as much as it may."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """ttl_s: how long an entry stays that nobody writes. max_bytes: of all entries together; more is refused."""

    name: str
    ttl_s: float
    max_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """revision: of this value; larger than that of any value before it."""

    value: bytes
    revision: int


class KeyValue(Protocol):
    """One bucket. What went wrong on the way (BusTimeout, BusDisconnected) may have been done all the same: read it
    again before you try it again. A malformed key or a value above MAX_PAYLOAD_BYTES is a ValueError."""

    async def get(self, key: str) -> Entry | None: ...

    async def create(self, key: str, value: bytes) -> int:
        """The revision; KvConflict where there is an entry already."""

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """The new revision; KvConflict unless the entry is there and at `revision`."""

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Idempotent; with a revision KvConflict where the entry is at another one."""


def check_bucket(bucket: Bucket) -> None:
    if not _BUCKET.fullmatch(bucket.name) or bucket.ttl_s <= 0:
        raise ValueError(f"not a bucket: {bucket}")


def check_entry(key: str, value: bytes = b"") -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a key: {key!r}")
    if len(value) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"{key}: {len(value)} bytes are more than an entry may have")
