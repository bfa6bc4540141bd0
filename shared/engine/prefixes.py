"""Complete blocks of state that lie in the pool, by name, so that a request with the same beginning has them at once.

The names are those of the stores (`shared/store/keys.py`): a block's says all the tokens up to its end, whose request
it was, and what was lost on its way. Its pages stay findable while they are held and, after that, until somebody takes
them as fresh ones. Nobody writes to a complete block again, so any number of groups share it.

Only state that is kept by position can be found again: a model with windows or recurrent state has no prefixes.
"""

from collections.abc import Sequence

from shared.engine.sequence import Choice, Group
from shared.engine.sharing import NOTHING, Held, Naming
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout
from shared.state.pages import PageAllocator
from shared.store.keys import Chain, Lineage
from shared.transfer.formats.catalog import EXACT, lossiest

_AT_ONCE = 16


class Prefixes:
    """The named blocks of one pool. block_tokens: None where nothing is to be found again."""

    def __init__(self, pages: PageAllocator, layout: PoolLayout, identity: str, block_tokens: int | None) -> None:
        self._pages = pages
        self._identity = identity
        self._block_tokens = block_tokens or 0
        self._each = self._block_tokens // layout.page_tokens
        by_position = all(component.index is IndexKind.PAGE for component in layout.components)
        self.are_kept = by_position and self._each > 0 and self._block_tokens % layout.page_tokens == 0

    def find(self, group: Group) -> tuple[list[int], Held]:
        """The pages of the longest beginning of the trunk that is here, but never its last position: that is computed
        in any case. What was lost least counts where there is as much of it."""
        best: tuple[list[int], Held] = [], NOTHING
        if group.sharing is None or not self.are_kept:
            return best
        names = group.sharing.accepts if group.naming is None else (group.naming.lineage.lossiest,)
        for name in names:
            pages = self._run(self._lineage(group.sharing.salt, name), group.trunk)
            if len(pages) > len(best[0]):
                best = pages, Held(len(pages) // self._each * self._block_tokens, name)
        return best

    def begin(self, group: Group, came_by: str = EXACT) -> None:
        """From now on the group's blocks get their names. came_by: the lossiest way of what others brought of it."""
        if group.sharing is not None and self.are_kept and group.naming is None:
            lineage = self._lineage(group.sharing.salt, lossiest((came_by, group.held.lossiest)))
            group.naming = Naming(lineage, Chain(lineage))

    def fork(self, group: Group) -> Naming | None:
        """For a choice that goes on behind the trunk; the trunk's names are made once for all of them."""
        if group.naming is None:
            return None
        chain, whole = group.naming.chain, group.trunk_len - group.trunk_len % self._block_tokens
        chain.extend(group.trunk[chain.num_tokens : whole])
        return group.naming.fork()

    def note_trunk(self, group: Group) -> None:
        """The state of more of its positions has come to be."""
        if group.naming is not None and group.trunk_slot is not None:
            self._note(group.naming, group.trunk, group.trunk_pages, group.computed)

    def note_choice(self, group: Group, choice: Choice) -> None:
        if choice.naming is not None and choice.computed >= (choice.naming.num_named + 1) * self._block_tokens:
            self._note(choice.naming, (*group.prompt, *choice.outputs), choice.pages, choice.computed)

    def _note(self, naming: Naming, tokens: Sequence[int], pages: Sequence[int], computed: int) -> None:
        blocks = computed // self._block_tokens
        if blocks <= naming.num_named:
            return
        naming.chain.extend(tokens[naming.chain.num_tokens : blocks * self._block_tokens])
        keys = naming.chain.keys
        for block in range(naming.num_named, blocks):
            for part in range(self._each):
                self._pages.name(pages[block * self._each + part], (keys[block], part))
        naming.num_named = blocks

    def _run(self, lineage: Lineage, tokens: Sequence[int]) -> list[int]:
        """Names are made as far as they are found, and a little further: most prompts begin like no other."""
        chain, found = Chain(lineage), list[int]()
        end = (len(tokens) - 1) // self._block_tokens * self._block_tokens
        for start in range(0, end, _AT_ONCE * self._block_tokens):
            for key in chain.extend(tokens[start : min(end, start + _AT_ONCE * self._block_tokens)]):
                pages = [self._pages.find((key, part)) for part in range(self._each)]
                whole = [page for page in pages if page is not None]
                if len(whole) < self._each:
                    return found
                found += whole
        return found

    def _lineage(self, salt: str, name: str) -> Lineage:
        return Lineage(self._identity, salt, name, self._block_tokens)
