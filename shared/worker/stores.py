"""The stores as a worker's tickets use them: one client for all, and who may put now.

A worker without a client (stores switched off, or state that cannot be kept in blocks) has no `Stores` either.
"""

import logging

from shared.engine.api import Engine
from shared.runtime.deps import Deps
from shared.runtime.errors import GeometryMismatch
from shared.state.components import IndexKind
from shared.store.client import StoreClient, StoreClientSettings
from shared.store.keys import Lineage
from shared.store.roster import Roster
from shared.store.runs import PutOutcome
from shared.transfer.link import Link

log = logging.getLogger(__name__)

_PAUSE_S = 3.0
"""A store that refused, or did not answer, is left alone for so long."""
_LENT_SHARE = 4
"""At most a quarter of a worker's pages wait for slow stores."""


class Stores:
    """`find` makes them. client: puts, looks up and loads. What is put is counted here, for all tickets."""

    def __init__(self, deps: Deps, engine: Engine, client: StoreClient, *, writes: bool = True) -> None:
        self.client = client
        self.engine = engine
        self._deps = deps
        self._writes = writes
        self._paused_until = float("-inf")
        self._most_lent = engine.pages()[0] // _LENT_SHARE
        self.num_lent = 0

    @classmethod
    def find(
        cls, deps: Deps, engine: Engine, link: Link, roster: Roster, settings: StoreClientSettings, *, writes: bool
    ) -> "Stores | None":
        """None, with the reason in the log, where this worker's state cannot be kept in blocks. writes: what it
        computes lies where its sidecar can read it."""
        others = [c.name for c in engine.layout.components if c.index is not IndexKind.PAGE]
        if others:
            log.info("no state is put into stores: %s is not kept by position", ", ".join(others))
            return None
        try:
            client = StoreClient(deps, link, engine.layout, engine.identity, roster.stores, settings)
        except GeometryMismatch as why:
            log.info("no state is put into stores: %s", why)
            return None
        return cls(deps, engine, client, writes=writes)

    @property
    def block_tokens(self) -> int:
        return self.client.block_tokens

    def lineage(self, salt: str, lossiest: str) -> Lineage:
        return Lineage(self.engine.identity, salt, lossiest, self.block_tokens)

    def lendable(self, num_pages: int) -> int:
        """How many of so many pages can be spared now; 0 where nobody would take their blocks."""
        if not self._writes or self._deps.clock.now() < self._paused_until or not self.client.are_there:
            return 0
        return min(num_pages, self._most_lent - self.num_lent)

    def note(self, outcomes: tuple[PutOutcome, ...]) -> None:
        """Counts what was put; where nobody took anything, nobody is asked for a moment."""
        self._deps.counters.add("blocks_put", sum(outcome.sent for outcome in outcomes))
        if all(outcome.error is not None for outcome in outcomes):
            self._paused_until = self._deps.clock.now() + _PAUSE_S
