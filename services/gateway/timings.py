"""When what happened to a request: the body of `baton.timings`."""

from collections.abc import Sequence

from services.gateway.generation import TokenEvent
from shared.protocol.messages import TicketTimings, overlap_of
from shared.runtime.clock import Clock


class Stopwatch:
    """All times are seconds. `queue_s` is the gateway's queue, `prefill_queue_s` that of whoever computes the prompt;
    `handoff_gap_s` is from the first token to the second as the gateway saw them. `queue_s` and `reserve_s` are
    those of the attempt that brought the first token; what a ticket says of itself is the last one's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_at = clock.now()
        self._queue_s = 0.0
        self._reserve_s = 0.0
        self._routed_at = self._begun_at
        self._first_at: float | None = None
        self._second_at: float | None = None
        self._last_at: dict[int, float] = {}
        self._largest_gap_s = 0.0
        self._num_tokens = 0
        self._ticket: TicketTimings | None = None
        self.cached_tokens = 0
        """Of the first ticket: what comes after a loss is not the client's saving."""

    def routed(self) -> None:
        self._routed_at = self._clock.now()
        if self._first_at is None:
            self._queue_s = self._routed_at - self._begun_at

    def granted(self) -> None:
        if self._first_at is None:
            self._reserve_s = self._clock.now() - self._routed_at

    def ticket(self, timings: TicketTimings) -> None:
        if self._ticket is None:
            self.cached_tokens = timings.cached_tokens
        self._ticket = timings

    @property
    def last_ticket(self) -> TicketTimings:
        """All zero before one has said anything."""
        return self._ticket or TicketTimings()

    def tokens(self, batch: Sequence[TokenEvent]) -> None:
        now = self._clock.now()
        for event in batch:
            self._num_tokens += 1
            if self._first_at is None:
                self._first_at = now
            elif self._second_at is None and event.index == 1:
                self._second_at = now
            if event.choice in self._last_at:
                self._largest_gap_s = max(self._largest_gap_s, now - self._last_at[event.choice])
            self._last_at[event.choice] = now

    def as_dict(self) -> dict[str, object]:
        ticket = self.last_ticket
        first = None if self._first_at is None else self._first_at - self._begun_at
        second = None if self._second_at is None else self._second_at - self._begun_at
        return {
            "queue_s": self._queue_s,
            "reserve_s": self._reserve_s,
            "prefill_queue_s": ticket.queue_s,
            "prefill_s": ticket.prefill_s,
            "transfer_s": ticket.transfer_s,
            "moved_s": ticket.moved_s,
            "overlap": overlap_of(ticket.prefill_s, ticket.transfer_s, ticket.moved_s),
            "commit_s": ticket.commit_s,
            "load_s": ticket.load_s,
            "loaded_tokens": ticket.loaded_tokens,
            "loaded_bytes": ticket.loaded_bytes,
            "held_tokens": ticket.held_tokens,
            "cached_tokens": self.cached_tokens,
            "first_token_s": first,
            "second_token_s": second,
            "handoff_gap_s": None if first is None or second is None else second - first,
            "largest_gap_s": self._largest_gap_s,
            "total_s": self._clock.now() - self._begun_at,
            "num_tokens": self._num_tokens,
            "bytes": dict(ticket.bytes),
            "wire_format": ticket.wire_format,
            "wire_bytes": dict(ticket.wire_bytes),
            "backend": ticket.backend,
            "backend_asked": ticket.backend_asked,
        }
