"""What a worker puts and finds: runs of a chain of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from shared.runtime.errors import BatonError


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Some blocks of a chain, one after the other. root: the chain's first block. parent: of the first one of these;
    b"" where that is the root. first_block: how many come before it."""

    keys: tuple[bytes, ...]
    root: bytes
    parent: bytes = b""
    first_block: int = 0

    @classmethod
    def of(cls, chain: Sequence[bytes], start: int = 0, end: int | None = None) -> Self:
        """Blocks [start, end) of a whole chain."""
        keys = tuple(chain[start:end])
        return cls(keys, chain[0] if chain else b"", chain[start - 1] if start else b"", start)

    def part(self, start: int, end: int) -> "BlockRun":
        parent = self.keys[start - 1] if start else self.parent
        return replace(self, keys=self.keys[start:end], parent=parent, first_block=self.first_block + start)


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """At one store. sent: blocks that it wanted and now has. held: so many leading blocks of the run it has, at least.
    error: why it did not take all that it wanted."""

    store: str
    sent: int = 0
    held: int = 0
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A lease at one store, on the leading blocks of a run: until `deadline` (clock time) they stay. beneath: which of
    them are not in memory there."""

    store: str
    peer: str
    lease: int
    run: BlockRun
    num_bytes: int
    beneath: tuple[int, ...]
    deadline: float

    @property
    def num_blocks(self) -> int:
        return len(self.run.keys)
