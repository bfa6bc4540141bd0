"""What of a group's state others may have, and what it has of theirs."""

from dataclasses import dataclass

from shared.store.keys import Chain, Lineage
from shared.transfer.formats.catalog import EXACT


@dataclass(frozen=True, slots=True)
class Sharing:
    """With whom a group shares state. salt: with those that say the same. accepts: what may have been lost on the way
    of what it finds, names of the formats' catalog."""

    salt: str = ""
    accepts: tuple[str, ...] = (EXACT,)


@dataclass(frozen=True, slots=True)
class Held:
    """Leading positions of a trunk whose state was in the pool already. lossiest: what it had come by."""

    num_tokens: int = 0
    lossiest: str = EXACT


NOTHING = Held()


@dataclass(slots=True)
class Naming:
    """The names of one sequence's blocks: the first num_named of the chain's keys are given."""

    lineage: Lineage
    chain: Chain
    num_named: int = 0

    def fork(self) -> "Naming":
        """For a sequence that goes on otherwise from here."""
        return Naming(self.lineage, self.chain.fork(), self.num_named)
