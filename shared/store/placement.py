"""Which kvstores a chain of blocks belongs to: rendezvous hashing by the chain's *root block*. Pure.

By the root and not block by block, so that a prefix lies in one store: one lookup finds how much of it is there, one
load brings it, and its digests are those of one sender. The price is that prompts with one beginning (a long system
prompt) share a store however different they go on; `copies` spreads what is put, and a tenant's salt tells tenants
apart. When a store joins or leaves, only the chains that it gains or had move; what they left behind is still found,
because a lookup asks the next in rank too.
"""

import hashlib
from collections.abc import Iterable

_ASKED = 2
"""A lookup asks so many stores at least: where one has just joined, what it will have is still at the next one."""


def ranked(root: bytes, stores: Iterable[str]) -> list[str]:
    """All of them, the one that the chain belongs to first. stores: names that stay the same when one is restarted."""
    return sorted(set(stores), key=lambda name: (_score(root, name), name), reverse=True)


def homes(root: bytes, stores: Iterable[str], copies: int) -> list[str]:
    """Where its blocks are put; fewer than `copies` where there are not so many stores."""
    return ranked(root, stores)[:copies]


def asked(root: bytes, stores: Iterable[str], copies: int) -> list[str]:
    """Where they are looked for, in this order."""
    return ranked(root, stores)[: max(_ASKED, copies)]


def _score(root: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), key=root[:64], digest_size=8).digest()
