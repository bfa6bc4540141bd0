"""Which workers were sent which beginnings of prompts: a guess at what lies in their pools, for the choice of a route.

Nobody reports what it keeps. What was sent to a worker is likely to be there still; where it is not, the worker
computes it, or says that it has less than was thought and is not thought of again for that.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from services.gateway.workers import Worker
from shared.store.keys import Chain, Lineage

STORES = "*stores*"
"""All of them together, where a peer's name stands."""
_MOST_BLOCKS = 1 << 16
"""That are remembered: some 22 MiB."""


class Prefixes:
    """Of all workers. block_tokens: as theirs. Blocks that were not asked about for longest are forgotten first."""

    def __init__(self, block_tokens: int, most_blocks: int = _MOST_BLOCKS) -> None:
        self.block_tokens = block_tokens
        self._most_blocks = most_blocks
        self._peers: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def chain(self, salt: str) -> Chain:
        """Of a request's blocks. salt: as the workers have it, and what else parts those that share nothing. The names
        are our own: models are not told apart, since no two of them are asked for the same answer."""
        return Chain(Lineage("", salt, block_tokens=self.block_tokens))

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
    """One request's: its prompt, and behind it what a single choice has given out. salt: of its blocks. is_there:
    whether a worker is alive, since nothing is noted of one that is gone."""

    def __init__(self, prefixes: Prefixes, salt: str, is_there: Callable[[str], bool]) -> None:
        self._prefixes = prefixes
        self._chain = prefixes.chain(salt)
        self._is_there = is_there

    def grow(self, tokens: Sequence[int]) -> None:
        """These are all of them by now; they only become more."""
        self._chain.extend(tokens[self._chain.num_tokens :])

    def held(self) -> dict[str, int]:
        """peer -> so many leading positions may be there, and can be had: the last one is always computed."""
        num_tokens, block = self._chain.num_tokens, self._prefixes.block_tokens
        most = max(0, num_tokens - 1) // block * block
        return {peer: min(held, most) for peer, held in self._prefixes.held(self._chain.keys).items()}

    def sent(self, *workers: Worker) -> None:
        """These have all of it."""
        for worker in workers:
            # Others find nothing again, or by other blocks.
            if worker.report.block_tokens == self._prefixes.block_tokens and self._is_there(worker.peer):
                self._prefixes.note(worker.peer, self._chain.keys)

    def kept(self, position: int) -> None:
        """The stores have it up to there."""
        self._prefixes.note(STORES, self._chain.keys[: position // self._prefixes.block_tokens])

    def gone(self, peer: str) -> None:
        """It has less of it than was thought."""
        self._prefixes.correct(peer, self._chain.keys)
