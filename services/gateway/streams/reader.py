"""One connection's way along a tape: for the HTTP side it is a `Generator` like any other.

It begins behind what the client has, and its end ends nothing but itself.
"""

from collections.abc import AsyncIterator, Callable, Sequence

from services.gateway.generation import GenerationRequest, TokenEvent
from services.gateway.streams.tape import Tape
from shared.runtime.errors import BatonError


class Reader:
    """start: tokens of each choice that the client has. on_close: called once, when the connection is done with it."""

    def __init__(
        self,
        tape: Tape,
        requests: Sequence[GenerationRequest],
        start: Sequence[int],
        on_close: Callable[["Reader"], None] = lambda reader: None,
    ) -> None:
        n = len(tape.prompts[0].events)
        self.tape = tape
        self.closed_because: BatonError | None = None
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._places = [list(start[number * n : (number + 1) * n]) for number in range(len(requests))]
        self._on_close = on_close
        self._is_closed = False

    def generate(self, request: GenerationRequest) -> "TapeGeneration":
        """What the tape has of this prompt."""
        return TapeGeneration(self, self._numbers[request.request_id])

    def end(self, why: BatonError) -> None:
        """Another connection has taken its place, or the stream went elsewhere."""
        self.closed_because = self.closed_because or why
        self.tape.grown.set()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_close(self)

    def take(self, number: int) -> tuple[TokenEvent, ...]:
        """What has come of this prompt since the last call."""
        places, batch = self._places[number], []
        for choice, events in enumerate(self.tape.prompts[number].events):
            batch += events[places[choice] :]
            places[choice] = len(events)
        return tuple(batch)


class TapeGeneration:
    """Implements `Generation`. A stop string was found by whoever drives the stream, at the same token."""

    def __init__(self, reader: Reader, number: int) -> None:
        self._reader = reader
        self._number = number

    def __aiter__(self) -> AsyncIterator[tuple[TokenEvent, ...]]:
        return self._run()

    async def _run(self) -> AsyncIterator[tuple[TokenEvent, ...]]:
        reader, tape = self._reader, self._reader.tape
        prompt = tape.prompts[self._number]
        while True:
            if reader.closed_because is not None:
                raise reader.closed_because
            if batch := reader.take(self._number):
                yield batch
            elif prompt.timings is not None:
                return
            elif tape.failure is not None:
                raise tape.failure
            else:  # all was looked at since the last await, so whatever comes from now on sets it again
                tape.grown.clear()
                await tape.grown.wait()

    @property
    def path(self) -> str:
        return self._reader.tape.prompts[self._number].path

    @property
    def cached_tokens(self) -> int:
        return self._reader.tape.prompts[self._number].cached_tokens or 0

    def timings(self) -> dict[str, object]:
        return self._reader.tape.prompts[self._number].timings or {}

    def stop_choice(self, choice: int) -> None:
        """Its driver has done so already."""

    async def aclose(self) -> None:
        """The reader is closed as a whole, by whoever made it."""
