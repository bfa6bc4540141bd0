"""A ticket's whole blocks go into the stores as they complete, in the background, in the lowest class.

Nothing waits for that: pages are lent the moment their block is complete (`shared/engine/lending.py`), and whoever they
belonged to may end or give way. What no store takes is not kept, and costs nothing else.
"""

from collections.abc import Callable, Iterable

from shared.engine.lending import Loan
from shared.runtime.deps import Deps
from shared.store.keys import Chain, Lineage
from shared.store.runs import BlockRun, PutOutcome
from shared.transfer.link import TicketKey
from shared.worker.stores import Stores


class Checkpoint:
    """tokens: those whose state the ticket has or will have, from position 0 on. tenant: whose quota the blocks count
    against. on_stored: told up to which position some one store has had it from the beginning on, whenever that is
    further than before; of several homes each may have less, and what it has may go."""

    def __init__(
        self,
        deps: Deps,
        stores: Stores,
        key: TicketKey,
        lineage: Lineage,
        tokens: Iterable[int],
        tenant: str,
        on_stored: Callable[[int], None],
    ) -> None:
        self._deps, self._stores, self._key, self._tenant = deps, stores, key, tenant
        self._block_tokens = stores.block_tokens
        self._chain = Chain(lineage)
        self._tokens = list(tokens)
        self._on_stored = on_stored
        self._loans: list[Loan] = []
        self._first = self._next = 0
        """Blocks [first, next) are lent and wait for their put."""
        self._complete = self._tried = 0
        """So many blocks there are, and were lent once: what no store took is offered again with the next one."""
        self._putting = False
        self._stored = 0

    def add(self, token: int) -> None:
        """The next token behind those that are known."""
        self._tokens.append(token)

    def reach(self, position: int) -> None:
        """All positions below have their state. Cheap: called after every step."""
        end = position // self._block_tokens
        if end <= self._tried:
            return
        self._complete = end
        each = self._block_tokens // self._stores.engine.layout.page_tokens
        end = self._next + self._stores.lendable((end - self._next) * each) // each
        if end <= self._next:
            return
        loan = self._stores.engine.lend(self._key, self._next * self._block_tokens, end * self._block_tokens)
        if loan is None:
            return
        self._loans.append(loan)
        self._stores.num_lent += len(loan.pages)
        self._next = end
        self._tried = max(self._tried, end)
        if not self._putting:
            self._putting = True
            self._deps.spawn(self._put_all(), f"checkpoint-{self._key.room}")

    async def _put_all(self) -> None:
        """Until nothing waits; what completes meanwhile goes together. Where a put fails as none should, all is offered
        again with the next block."""
        try:
            while self._loans:
                loans, self._loans = self._loans, []
                start, self._first = self._first, self._next
                try:
                    self._settle(start, self._first, await self._put(start, self._first, loans))
                finally:
                    self._close(loans)
        except BaseException:
            self._first = self._next = 0
            raise
        finally:
            self._close(self._loans)
            self._loans, self._putting = [], False
        self.reach(self._complete * self._block_tokens)  # more than could be lent at a time

    async def _put(self, start: int, end: int, loans: list[Loan]) -> tuple[PutOutcome, ...]:
        self._chain.extend(self._tokens[self._chain.num_tokens : end * self._block_tokens])
        run = BlockRun.of(self._chain.keys, start, end)
        return await self._stores.client.put(run, [page for loan in loans for page in loan.pages], self._tenant)

    def _settle(self, start: int, end: int, outcomes: tuple[PutOutcome, ...]) -> None:
        """Where a home lacks some of it (it was full, or lost what came before), all is offered again with the next
        block."""
        self._stores.note(outcomes)
        held = [start + outcome.held for outcome in outcomes]  # without what comes before `start` a home takes nothing
        if min(held, default=start) < end and not self._loans:
            self._first, self._next, self._tried = 0, 0, self._complete
        if held and max(held) > max(start, self._stored):
            self._stored = max(held)
            self._on_stored(self._stored * self._block_tokens)

    def _close(self, loans: list[Loan]) -> None:
        for loan in loans:
            self._stores.num_lent -= len(loan.pages)
            loan.close()
