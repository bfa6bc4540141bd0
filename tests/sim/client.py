"""A simulated client: asks, takes what comes, compares it with the right answer, and may leave."""

import asyncio
from collections.abc import Callable
from enum import Enum

from services.gateway.generation import Generation, GenerationRequest, TokenEvent
from shared.protocol.messages import TokenLogprob
from shared.runtime.errors import BatonError
from tests.sim.plan import Visit

_LOGPROB_EPSILON = 1e-4


class Outcome(Enum):
    RIGHT = "right"
    LEFT = "left"
    GATEWAY_LOST = "gateway lost"
    ERROR = "error"


class Client:
    """Every token it gets must be the next one of the right answer."""

    def __init__(self, visit: Visit, fail: Callable[[str, str], None]) -> None:
        self.visit = visit
        self.tokens: list[list[int]] = [[] for _ in visit.kind.answer]
        self.finishes: list[str | None] = [None] * len(self.tokens)
        self.outcome: Outcome | None = None
        self.error: BatonError | None = None
        self.timings: dict[str, object] = {}
        self._fail = fail

    def request(self) -> GenerationRequest:
        visit = self.visit
        return GenerationRequest(
            f"req-{visit.number}",
            visit.kind.prompt,
            visit.kind.sampling,
            visit.path,  # type: ignore[arg-type]
            visit.strict,
            visit.timeout_s,
        )

    async def take(self, generation: Generation) -> None:
        """Iterates to the end, or until it leaves. BatonErrors are kept; a cancellation goes through."""
        batches = 0
        try:
            async for batch in generation:
                batches += 1
                for event in batch:
                    self._take(event)
                    if event.choice == 0 and self.visit.stop_after == len(self.tokens[0]):
                        generation.stop_choice(0)
                if batches == self.visit.leave_after:
                    self.outcome = Outcome.LEFT
                    return
            self._check_whole()
            self.outcome = Outcome.RIGHT
        except BatonError as error:
            self.error, self.outcome = error, Outcome.ERROR
            self.timings = generation.timings()
        finally:
            await generation.aclose()

    def _take(self, event: TokenEvent) -> None:
        if event.choice >= len(self.tokens):
            return self._wrong(f"choice {event.choice} was not asked for")
        mine, right = self.tokens[event.choice], self.visit.kind.answer[event.choice]
        where = f"choice {event.choice}, token {event.index}"
        if event.index != len(mine) or self.finishes[event.choice] is not None:
            return self._fail("each token exactly once", f"{self._name}: {where} after {len(mine)} tokens")
        if event.index >= len(right.tokens) or event.token != right.tokens[event.index]:
            return self._wrong(f"{where} is {event.token}, not one of {right.tokens[event.index : event.index + 1]}")
        if not _alike(event.logprob, right.logprobs[event.index]):
            return self._wrong(f"{where} has {event.logprob}, not {right.logprobs[event.index]}")
        mine.append(event.token)
        self.finishes[event.choice] = event.finish
        if event.finish is not None and (event.finish is not right.finish or len(mine) < len(right.tokens)):
            self._wrong(f"{where} ends it with {event.finish}")

    def _check_whole(self) -> None:
        for number, right in enumerate(self.visit.kind.answer):
            was_stopped = number == 0 and self.visit.stop_after is not None
            if len(self.tokens[number]) < len(right.tokens) and not was_stopped:
                self._wrong(f"choice {number} ended after {len(self.tokens[number])} of {len(right.tokens)} tokens")
            elif self.finishes[number] is None and not was_stopped:
                self._wrong(f"choice {number} ended without a reason")

    def _wrong(self, detail: str) -> None:
        self._fail("tokens are a prefix of the right answer", f"{self._name}: {detail}")

    @property
    def _name(self) -> str:
        return f"request {self.visit.number}"


def _alike(given: TokenLogprob | None, right: TokenLogprob | None) -> bool:
    if given is None or right is None:
        return given is right
    pairs = [(given.logprob, right.logprob), *((g[1], r[1]) for g, r in zip(given.top, right.top, strict=False))]
    same_tokens = [token for token, _ in given.top] == [token for token, _ in right.top]
    return same_tokens and all(abs(g - r) < _LOGPROB_EPSILON for g, r in pairs)


async def connected_to(is_there: Callable[[], bool]) -> None:
    """A client tries again until the gateway takes its connection."""
    while not is_there():
        await asyncio.sleep(0.05)
