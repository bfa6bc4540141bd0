"""Names of stored state by what it was computed from, so that equal state has one name in every process and on every
machine, and state that differs in anything never shares one.

A key is a blake2b of 16 bytes over an encoding with one reading: integers little-endian of fixed width, text as UTF-8
behind its length in bytes. The hash's `person` says which of the three kinds it is, and in which version.

    root       baton-root-v1    u64 len, identity · u64 len, salt · u64 len, lossiest · u64 block_tokens
    block      baton-block-v1   the parent's key (a block's, or the root) · u32 for each of its block_tokens tokens
    snapshot   baton-snap-v1    the key of the last whole block before it, or the root · u64 position · u32 for each
                                token after that block

Whoever changes any of this gives it another version: what has been stored is then not found, and never mistaken.
"""

import hashlib
import struct
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from shared.transfer.formats.catalog import EXACT, LOSSINESS, lossiest

BlockKey = bytes
Tokens = Sequence[int] | np.ndarray
KEY_BYTES = 16
_ROOT, _BLOCK, _SNAPSHOT = b"baton-root-v1", b"baton-block-v1", b"baton-snap-v1"
_U64 = struct.Struct("<Q")
_TOKEN_BYTES = 4
_MAX_TOKEN = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Lineage:
    """What all blocks of a chain have in common. identity: the worker's, which says model, weights, their format and
    the dtype of the state. salt: who may share with whom, the tenant unless something else was asked for. lossiest: a
    name of the wire formats' catalog: the worst that any of the blocks came by; all exact ones count as one."""

    identity: str
    salt: str = ""
    lossiest: str = EXACT
    block_tokens: int = 64

    def __post_init__(self) -> None:
        if self.block_tokens <= 0:
            raise ValueError(f"a block of {self.block_tokens} tokens")
        if self.lossiest not in LOSSINESS:
            raise ValueError(f"no wire format is called {self.lossiest!r}")

    def root(self) -> BlockKey:
        """The parent of first blocks."""
        texts = (self.identity, self.salt, lossiest((self.lossiest,)))
        return _hash(_ROOT, *(_text(text) for text in texts), _U64.pack(self.block_tokens))


class Chain:
    """The keys of a growing run of tokens. Equal to `chain` of all of them at every moment, however they came."""

    def __init__(self, lineage: Lineage) -> None:
        self._block_bytes = lineage.block_tokens * _TOKEN_BYTES
        self._parent = lineage.root()
        self._keys: list[BlockKey] = []
        self._tail = b""
        self.num_tokens = 0

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """One for every whole block, in order."""
        return tuple(self._keys)

    def extend(self, tokens: Tokens) -> tuple[BlockKey, ...]:
        """The keys of the blocks that these tokens complete. Raises ValueError for what is no token id, and then
        nothing has changed."""
        encoded = _encode(tokens)
        data, size, before = self._tail + encoded, self._block_bytes, len(self._keys)
        whole = len(data) - len(data) % size
        for start in range(0, whole, size):
            self._parent = _hash(_BLOCK, self._parent, data[start : start + size])
            self._keys.append(self._parent)
        self._tail = data[whole:]
        self.num_tokens += len(encoded) // _TOKEN_BYTES
        return tuple(self._keys[before:])

    def fork(self) -> "Chain":
        """One that goes on by itself from here."""
        other = copy(self)
        other._keys = list(self._keys)
        return other

    def snapshot_key(self) -> BlockKey:
        """Of request-indexed state after exactly these tokens."""
        return _hash(_SNAPSHOT, self._parent, _U64.pack(self.num_tokens), self._tail)


def chain(lineage: Lineage, tokens: Tokens) -> tuple[BlockKey, ...]:
    """One key for every whole block of these tokens; what is left over has none."""
    return Chain(lineage).extend(tokens)


def snapshot_key(lineage: Lineage, tokens: Tokens) -> BlockKey:
    """Of request-indexed state at position len(tokens) exactly."""
    links = Chain(lineage)
    links.extend(tokens)
    return links.snapshot_key()


def _hash(kind: bytes, *pieces: bytes) -> bytes:
    return hashlib.blake2b(b"".join(pieces), digest_size=KEY_BYTES, person=kind).digest()


def _text(text: str) -> bytes:
    """Any text, the halves of surrogate pairs that JSON can bring included."""
    encoded = text.encode("utf-8", "surrogatepass")
    return _U64.pack(len(encoded)) + encoded


def _encode(tokens: Tokens) -> bytes:
    array = np.asarray(tokens)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() > _MAX_TOKEN:
        raise ValueError("token ids are whole numbers of 32 bits")
    return array.astype("<u4").tobytes()
