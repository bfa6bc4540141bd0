"""Which workers were sent which beginnings of prompts: a guess at what lies in their pools, for the choice of a route.

Nobody reports what it keeps. What was sent to a worker is likely to be there still; where it is not, the worker
computes it, or says that it has less than was thought and is not thought of again for that.
"""

from collections import OrderedDict
from collections.abc import Sequence

from services.gateway.router import Route
from services.gateway.workers import Worker
from shared.store.keys import Lineage, chain

STORES = "*stores*"
"""All of them together, where a peer's name stands."""
_MOST_BLOCKS = 1 << 16
"""That are remembered: some 16 MiB."""


class Prefixes:
    """Of all workers. block_tokens: as theirs. Blocks that were not asked about for longest are forgotten first."""

    def __init__(self, block_tokens: int, most_blocks: int = _MOST_BLOCKS) -> None:
        self.block_tokens = block_tokens
        self._most_blocks = most_blocks
        self._peers: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def keys(self, salt: str, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """One for every whole block. salt: as the workers have it. The names are our own: models are not told apart,
        since no two of them are asked for the same answer."""
        return chain(Lineage("", salt, block_tokens=self.block_tokens), tokens)

    def note(self, peer: str, keys: Sequence[bytes]) -> None:
        """These blocks were sent there, or came to be there."""
        for key in reversed(keys):  # of a beginning the end is forgotten sooner
            self._peers.setdefault(key, set()).add(peer)
            self._peers.move_to_end(key)
        while len(self._peers) > self._most_blocks:
            self._peers.popitem(last=False)

    def held(self, keys: Sequence[bytes]) -> dict[str, int]:
        """peer -> so many leading positions may be there."""
        lengths: dict[str, int] = {}
        there: set[str] | None = None
        for number, key in enumerate(keys, 1):
            peers = self._peers.get(key, set())
            there = set(peers) if there is None else there & peers
            if not there:
                break
            lengths |= dict.fromkeys(there, number * self.block_tokens)
        for key in reversed(keys):
            if key in self._peers:
                self._peers.move_to_end(key)
        return lengths

    def correct(self, peer: str, keys: Sequence[bytes]) -> None:
        """That worker has less of it than was thought."""
        for key in keys:
            if (peers := self._peers.get(key)) is not None:
                peers.discard(peer)
                if not peers:
                    del self._peers[key]

    def forget(self, peer: str) -> None:
        """That worker is gone."""
        self.correct(peer, tuple(self._peers))


class Beginning:
    """One request's. salt: of its blocks."""

    def __init__(self, prefixes: Prefixes, salt: str) -> None:
        self._prefixes = prefixes
        self._salt = salt
        self._keys: tuple[bytes, ...] = ()

    def renew(self, tokens: Sequence[int]) -> None:
        """These are the tokens whose state the next attempt needs."""
        self._keys = self._prefixes.keys(self._salt, tokens)

    def held(self) -> dict[str, int]:
        return self._prefixes.held(self._keys)

    def sent(self, route: Route) -> None:
        """Its workers have them."""
        for worker in route.workers:
            self._note(worker, self._keys)

    def grown(self, route: Route, tokens: Sequence[int]) -> None:
        """D has these in the end."""
        self._note(route.decode, self._prefixes.keys(self._salt, tokens))

    def kept(self, tokens: Sequence[int], position: int) -> None:
        """The stores have these up to there."""
        if position:
            self._prefixes.note(STORES, self._prefixes.keys(self._salt, tokens[:position]))

    def gone(self, peer: str) -> None:
        """It has less of it than was thought."""
        self._prefixes.correct(peer, self._keys)

    def _note(self, worker: Worker, keys: Sequence[bytes]) -> None:
        if worker.report.block_tokens == self._prefixes.block_tokens:  # others find nothing again, or by other blocks
            self._prefixes.note(worker.peer, keys)
