"""What the model of a hand-over is made of: the two sides with their page books, and a network that keeps every message
until somebody delivers or drops it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from shared.machines import decode, prefill, request, transfer
from shared.machines.stepping import Cause, Outcome, Step
from shared.state.pages import PageAllocator

ROOM = 1
NUM_UNITS = 2
NUM_TOKENS = 4
D_PAGES, P_PAGES = 5, 4
DECODE, PREFILL, GATEWAY = "decode", "prefill", "gateway"
D, P = decode.DecodeState, prefill.PrefillState
WRONG = -1


def right_token(index: int) -> int:
    return 100 + index


@dataclass(frozen=True)
class Message:
    """`boot`: the incarnation of the receiver it is for. `data`: of tokens (index, token), of a failure its cause, of a
    reserve how many tokens the client has."""

    to: str
    boot: int
    kind: str
    generation: int
    data: Any = None


@dataclass
class Writer:
    """A transfer that was let in. It may write until it leaves, also after it was told to stop."""

    generation: int
    units: tuple[int, ...]
    at: int = 0


@dataclass
class DecodeSide:
    """pages: of the ticket, in logical order. content: page -> generation of the state in it, for ever."""

    boot: int = 1
    books: PageAllocator = field(default_factory=lambda: PageAllocator(D_PAGES))
    content: dict[int, int] = field(default_factory=dict)
    ticket: decode.DecodeTicket | None = None
    pages: list[int] = field(default_factory=list)
    door: transfer.ReceivingTicket | None = None
    writers: list[Writer] = field(default_factory=list)
    landed: Counter[int] = field(default_factory=Counter)
    records: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    in_step: bool = False
    num_tokens: int = 0


@dataclass
class PrefillSide:
    boot: int = 1
    books: PageAllocator = field(default_factory=lambda: PageAllocator(P_PAGES))
    ticket: prefill.PrefillTicket | None = None
    sent: int = 0
    reading: int | None = None
    """The generation whose pages are being read."""
    ended: set[int] = field(default_factory=set)


@dataclass
class Parts:
    network: list[Message] = field(default_factory=list)
    attempt: request.Attempt | None = None
    generation: int = 0
    emitted: list[int] = field(default_factory=list)
    history_len: int = 0
    """What the client had when the attempt began."""
    d: DecodeSide = field(default_factory=DecodeSide)
    p: PrefillSide = field(default_factory=PrefillSide)
    commits: Counter[int] = field(default_factory=Counter)
    first_causes: dict[tuple[str, int], Cause] = field(default_factory=dict)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    is_closing: bool = False

    # The network

    def send(self, to: str, kind: str, generation: int, data: Any = None) -> None:
        boot = {DECODE: self.d.boot, PREFILL: self.p.boot, GATEWAY: 0}[to]
        self.network.append(Message(to, boot, kind, generation, data))

    def _note(self, side: str, ticket: Any, step: Step[Any]) -> None:
        self.outcomes[step.outcome] += 1
        if step.ticket.cause is not None:
            first = self.first_causes.setdefault(
                (f"{side}{self.d.boot}{self.p.boot}", ticket.generation), step.ticket.cause
            )
            assert step.ticket.cause == first, "the first cause is kept"
