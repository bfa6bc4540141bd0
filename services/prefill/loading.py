"""The beginning of a prompt out of the stores: P has it loaded where that is sooner than to compute it.

Nothing waits long for it. A store that is silent costs one prompt a moment, and is then left alone for a while.
"""

import secrets

from services.prefill.ticket import PrefillTicket
from services.prefill.wire_choice import WireChoice
from shared.engine.sharing import Held
from shared.runtime.deps import Deps
from shared.runtime.errors import BatonError
from shared.transfer.link import Link
from shared.worker.loading import Loading, load_blocks
from shared.worker.stores import Stores

_SECRET_BYTES = 32
_LEAST_BLOCKS = 2
"""To load fewer is not worth the questions."""
_ANSWER_S = 0.25
_LOAD_S = (0.3, 5.0)
"""At least and at most; in between as long as to compute the same takes."""
_SILENCE_S = 10.0
_NEWEST = 0.3


class PromptLoading:
    """Of one worker. wire: knows how fast it computes."""

    def __init__(self, deps: Deps, link: Link, stores: Stores, wire: WireChoice) -> None:
        self._deps, self._link, self._stores, self._wire = deps, link, stores, wire
        self._alone_until = float("-inf")
        self._is_trying = False
        self._tokens_per_s: float | None = None
        self._measured_at = float("-inf")

    async def load(self, ticket: PrefillTicket, held: Held) -> int:
        """So many leading positions have their state in the ticket's pages now, those that were held among them."""
        deps, stores, prompt = self._deps, self._stores, ticket.order.prompt
        missing = (len(prompt) - 1) // stores.block_tokens - held.num_tokens // stores.block_tokens
        began_at = deps.clock.now()
        is_alone = began_at < self._alone_until or not stores.client.are_there
        unproven = self._tokens_per_s is None
        if missing < _LEAST_BLOCKS or is_alone or (unproven and self._is_trying):
            return held.num_tokens
        self._is_trying = True
        try:
            return await self._load(ticket, held, began_at)
        finally:
            self._is_trying = False

    async def _load(self, ticket: PrefillTicket, held: Held, began_at: float) -> int:
        deps, stores, prompt = self._deps, self._stores, ticket.order.prompt
        computes = self._wire.tokens_per_s
        as_long = (len(prompt) - held.num_tokens) / computes if computes else _LOAD_S[1]
        loading = Loading(
            key=ticket.key,
            secret=secrets.token_bytes(_SECRET_BYTES),
            trunk=prompt,
            sharing=ticket.sharing,
            held=held,
            deadline=min(ticket.deadline, began_at + min(max(as_long, _LOAD_S[0]), _LOAD_S[1])),
            priority=ticket.order.priority,
            answer_s=_ANSWER_S,
            doors=ticket.doors,
            is_worth=self._is_sooner,
        )
        try:
            loaded = await load_blocks(deps, self._link, stores, loading)
        except BatonError:  # the ticket's own end comes as a cancellation
            deps.counters.add("loads_failed")
            self._measured(0, deps.clock.now() - began_at)
            self._alone_until = deps.clock.now() + _SILENCE_S
            return held.num_tokens
        spent_s = deps.clock.now() - began_at
        if loaded.num_tokens > held.num_tokens:
            self._measured(loaded.num_tokens - held.num_tokens, spent_s)
        elif spent_s >= _ANSWER_S:
            self._alone_until = deps.clock.now() + _SILENCE_S
        return loaded.num_tokens

    def _is_sooner(self, num_tokens: int) -> bool:
        """Than to compute them. What was measured long ago says nothing any more."""
        pace, computes = self._tokens_per_s, self._wire.tokens_per_s
        is_old = self._deps.clock.now() - self._measured_at > 6 * _SILENCE_S
        return pace is None or computes is None or is_old or pace >= computes

    def _measured(self, num_tokens: int, spent_s: float) -> None:
        pace, known = num_tokens / max(spent_s, 1e-6), self._tokens_per_s
        self._tokens_per_s = pace if known is None else known + _NEWEST * (pace - known)
        self._measured_at = self._deps.clock.now()
