"""One live ticket on D: its machine, what it waits for, and every token it has produced."""

import asyncio
from dataclasses import dataclass, field

from shared.engine.api import Past, TokenOut
from shared.engine.sharing import NOTHING, Sharing
from shared.machines import decode as machine
from shared.protocol.messages import (
    Commit,
    CommitReply,
    FinishReason,
    FirstToken,
    Reserve,
    TicketTimings,
    TokenEntry,
    TokenLogprob,
)
from shared.runtime.clock import Clock
from shared.runtime.counters import Counters
from shared.transfer.formats.agree import accepted
from shared.transfer.formats.catalog import lossiest
from shared.transfer.link import TicketKey
from shared.worker.checkpoint import Checkpoint
from shared.worker.tickets import LiveTicket


@dataclass(slots=True)
class ChoiceLog:
    """The tokens of one choice from index `start` on, where those end that it had before it came here; kept until the
    ticket's tombstone goes, for replays."""

    start: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stopped: bool = False

    @property
    def end(self) -> int:
        """The index of the token that comes next."""
        return self.start + len(self.tokens)

    @property
    def done(self) -> bool:
        return self.finish is not None or self.stopped


class DecodeTicket(LiveTicket[Reserve, machine.DecodeTicket]):
    """secret: what a peer must know to write. state_len: positions whose state is handed over. held: those of them that
    are in its pages already, known once it is served; given: those and what the stores bring, which P need not send.
    record, commit_answer: P's word and ours. all_done: no choice is
    left. checkpoint: puts its blocks into the stores. timed: the timings are on their way to the gateway.
    """

    def __init__(self, order: Reserve, clock: Clock, counters: Counters, secret: bytes) -> None:
        state = machine.DecodeTicket(order.room, order.generation, remote=order.prefill is not None)
        super().__init__(order, state, machine.step, clock, counters)
        self.secret = secret
        self.past = past = Past(order.history, order.finished)
        self.state_len = len(past.trunk(order.prompt))
        accepts = dict.fromkeys(lossiest((name,)) for name in accepted(order.kv_precision))
        self.sharing = Sharing(order.salt, tuple(accepts))
        self.held = self.given = NOTHING
        self.record: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        self.commit_answer: asyncio.Future[CommitReply] = asyncio.get_running_loop().create_future()
        self.all_done = asyncio.Event()
        starts = [len(tokens) for tokens in past.outputs] or [0] * order.sampling.n
        self.choices = [ChoiceLog(start, stopped=k in past.finished) for k, start in enumerate(starts)]
        self.checkpoint: Checkpoint | None = None
        self.filling_at: float | None = None
        self.timings, self.timed = TicketTimings(), False
        self._clock = clock

    def first_bytes(self, _key: TicketKey) -> None:
        self.filling_at = self._clock.now()
        self.apply(machine.FirstBytes(self.key.generation))

    def log(self, out: TokenOut) -> bool:
        """Adds a token to its choice; False where it is not the next one (it is then dropped)."""
        choice = self.choices[out.choice]
        if out.index != choice.end or choice.done:
            return False
        choice.tokens.append(out.token)
        if out.logprob is not None:
            choice.logprobs.append(out.logprob)
        choice.finish = out.finish
        if self.checkpoint is not None:
            if len(self.choices) == 1:
                self.checkpoint.add(out.token)
            self.checkpoint.reach(self.stored_len)
        self._settle()
        return True

    @property
    def stored_len(self) -> int:
        """Positions that are worth storing and have their state: of a single choice all but the last token's."""
        if len(self.choices) > 1:
            return self.state_len
        return len(self.order.prompt) + max(0, self.choices[0].end - 1)

    def stop_choice(self, choice: int) -> bool:
        """The gateway ended a choice. True where that was news."""
        if choice >= len(self.choices) or self.choices[choice].done:
            return False
        self.choices[choice].stopped = True
        self._settle()
        return True

    def first_tokens(self) -> tuple[FirstToken, ...]:
        """The record's handoff tokens for the engine; a choice that the gateway has stopped meanwhile is finished."""
        return tuple(
            first.model_copy(update={"finish": FinishReason.STOP}) if self.choices[first.choice].stopped else first
            for first in self.record.result().first
        )

    def entry(self, choice: int, index: int) -> TokenEntry:
        """Choice `choice` from token `index` on, or from the first that it had here, as it goes to the gateway."""
        log = self.choices[choice]
        skipped = max(0, index - log.start)
        return TokenEntry(
            room=self.key.room,
            generation=self.key.generation,
            choice=choice,
            index=log.start + skipped,
            tokens=tuple(log.tokens[skipped:]),
            logprobs=tuple(log.logprobs[skipped:]),
            finish=log.finish,
        )

    def _settle(self) -> None:
        if all(choice.done for choice in self.choices):
            self.all_done.set()
