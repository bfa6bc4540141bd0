"""What keeps blocks beneath the kvstore's memory: the contract of all drivers (`disk`, `memory`, `redis`, `s3`).

A driver knows keys and bytes. Leases, generations, quotas and eviction are the kvstore's; here a block is whole or not
there, and what is read is what was written, or nothing.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

Parts = Sequence[memoryview]
"""Bytes in pieces, in order: a block lies scattered in the kvstore's pool, layer by layer. Contiguous bytes each."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """What is kept about a block beside its bytes. key: 16 bytes. digest: xxh3-128 over all of its bytes, 16 bytes.
    namespace: whose geometry the bytes have; a reader that expects another one gets nothing. tokens: positions it
    covers. snapshot: request-indexed state at one exact position, not a block of pages. written_s: seconds since the
    epoch."""

    key: bytes
    num_bytes: int
    digest: bytes
    namespace: str
    tenant: str
    tokens: int
    snapshot: bool = False
    written_s: float = 0.0


class BlockDriver(Protocol):
    """Methods raise StoreFull where there is no room, and StoreUnavailable where the device or server fails; anything
    else is a bug. They never block the loop. Several calls may be under way at once, also for one key.
    A call that is cancelled ends when nothing reads or writes the caller's pieces any more.

    name: as in the setting."""

    name: ClassVar[str]

    @property
    def durability(self) -> str:
        """One sentence for people: what survives what, as this one is set. Shown in `/cluster`."""

    async def open(self) -> None:
        """Connects, or scans and repairs what is there. Once, before all else."""

    def records(self) -> AsyncIterator[BlockRecord]:
        """Every whole block that is there. What is torn or damaged, as far as can be seen without reading every byte,
        has been dropped."""

    async def put(self, record: BlockRecord, parts: Parts) -> None:
        """Whole when this returns, and not visible before. What is there already under the key is replaced. After an
        error, or a crash at any moment, there is what was there before, or nothing, or the whole block."""

    async def get(self, key: bytes, namespace: str, into: Parts) -> BlockRecord | None:
        """Reads the block into these pieces, which are of its size in sum, and checks the digest of what they hold
        then. None where it is not there, is of another namespace or size, or does not match its digest; in the last
        case it is dropped. The pieces' content is unspecified after None or an error."""

    async def delete(self, key: bytes) -> None:
        """Idempotent."""

    def usage(self) -> tuple[int, int | None]:
        """(bytes that blocks take, the limit or None where the driver knows none), as far as known without asking."""

    async def close(self) -> None:
        """Idempotent."""
