"""Where gateways write down resumable streams, so that another one can go on with what its owner has said.

Two buckets. States are short-lived: an owner writes each anew with every batch, and without one every few seconds, so
a state that has gone unwritten for the grace period is gone. What never changes (requests and long runs of tokens) is
kept as long as a request may last.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shared.bus.base import Bus, BusError
from shared.bus.kv import Bucket, BucketGone, KeyValue, KvConflict, NoKeyValue
from shared.protocol.stream_messages import StreamPart, StreamRequest, StreamState
from shared.protocol.wire import MalformedMessage, WireModel, decode, encode
from shared.runtime.clock import Clock
from shared.runtime.errors import InvalidRequest, JournalUnavailable, NotResumable, StreamMoved, StreamNotFound

M = TypeVar("M", bound=WireModel)
T = TypeVar("T")

STATES, PARTS = "baton-v1-streams", "baton-v1-stream-parts"
TOUCHES = 4
"""So many times in a grace period a state is written at least."""
_PAUSE_S = 0.1
_PATIENCE_S = 20.0
"""So long the journal may be away before the stream is given up."""
_RETURN_S = 3.0
"""A server that has just started may not know its buckets yet; one that does not for so long has lost them."""


@dataclass(frozen=True, slots=True)
class Page:
    """A state as it was read. revision: what the next one replaces."""

    state: StreamState
    revision: int


class Journal:
    """Opened when it is first needed, and again where the server has lost it. grace_s: how long a stream outlives its
    owner. longest_s: how long a request may last."""

    def __init__(self, bus: Bus, clock: Clock, grace_s: float, longest_s: float) -> None:
        self._bus = bus
        self._clock = clock
        touched_s = grace_s / TOUCHES
        self._states_bucket = Bucket(STATES, ttl_s=grace_s + touched_s)
        self._parts_bucket = Bucket(PARTS, ttl_s=longest_s + 3 * (grace_s + touched_s))
        self._opened: tuple[KeyValue, KeyValue] | None = None
        self._opening = asyncio.Lock()

    async def begin(self, stream: str, request: StreamRequest, state: StreamState) -> int:
        """The first entries of a stream; the state's revision. NotResumable where there is no journal at all."""
        try:
            try:
                return await self._begin(stream, request, state)
            except BucketGone:
                self._opened = None
                return await self._begin(stream, request, state)
        except ValueError as error:
            raise InvalidRequest("the request is too large to be resumable") from error
        except BusError as error:
            raise JournalUnavailable(f"the stream could not be written down: {error}") from error

    async def _begin(self, stream: str, request: StreamRequest, state: StreamState) -> int:
        states, parts = await self._open()
        with contextlib.suppress(KvConflict):  # the name is new, so it can only be our own of a moment ago
            await parts.create(f"{stream}.request", encode(request))
        return await states.create(stream, encode(state))

    async def read(self, stream: str) -> Page | None:
        """None: it is not there, or has expired."""
        try:
            states, _ = await self._open()
            found = await states.get(stream)
            return None if found is None else Page(decode(StreamState, found.value), found.revision)
        except BucketGone:
            self._opened = None
            return None
        except MalformedMessage as error:
            raise JournalUnavailable(f"the stream's state cannot be read: {error}") from error
        except BusError as error:
            raise JournalUnavailable(f"the stream could not be looked up: {error}") from error

    async def request(self, stream: str) -> StreamRequest:
        """StreamNotFound where it was removed a moment ago."""
        return await self._kept(stream, "request", StreamRequest)

    async def parts(self, stream: str, names: Sequence[str]) -> list[StreamPart]:
        return [await self._kept(stream, name, StreamPart) for name in names]

    async def _kept(self, stream: str, name: str, kind: type[M]) -> M:
        try:
            _, parts = await self._open()
            found = await parts.get(f"{stream}.{name}")
            if found is None:
                raise StreamNotFound
            return decode(kind, found.value)
        except (MalformedMessage, BusError) as error:
            raise JournalUnavailable(f"a part of the stream cannot be read: {error}") from error

    async def keep(self, stream: str, part: StreamPart) -> str:
        """Puts a run of tokens away; its name, by which a state refers to it."""
        name, data = secrets.token_hex(4), encode(part)

        async def write() -> str:
            _, parts = await self._open()
            await parts.create(f"{stream}.{name}", data)
            return name

        async def find() -> str | None:
            _, parts = await self._open()
            return None if await parts.get(f"{stream}.{name}") is None else name

        return await self._insist(write, find)

    async def replace(self, stream: str, state: StreamState, revision: int) -> int:
        """Writes the next state; its revision. StreamMoved where another gateway has written one, JournalUnavailable
        where the journal has none any more."""
        data = encode(state)

        async def write() -> int:
            states, _ = await self._open()
            return await states.update(stream, data, revision)

        async def find() -> int | None:
            states, _ = await self._open()
            found = await states.get(stream)
            return found.revision if found is not None and found.value == data and found.revision > revision else None

        async def is_lost() -> bool:
            states, _ = await self._open()
            return await states.get(stream) is None

        return await self._insist(write, find, is_lost)

    async def _insist(
        self,
        write: Callable[[], Awaitable[T]],
        find: Callable[[], Awaitable[T | None]],
        is_lost: Callable[[], Awaitable[bool]] | None = None,
    ) -> T:
        """A server that is away is waited for. What was written although no answer came back is found again. is_lost:
        whether a write is refused because the entry it replaces is gone."""
        began, uncertain = self._clock.now(), False
        while True:
            try:
                try:
                    return await write()
                except KvConflict as error:
                    if uncertain and (done := await find()) is not None:
                        return done
                    if is_lost is not None and await is_lost():
                        raise JournalUnavailable("the journal has lost the stream, or forgotten it") from error
                    raise StreamMoved("another gateway serves this stream") from error
            except ValueError as error:
                raise JournalUnavailable("the stream has become too large to be written down") from error
            except (BusError, NotResumable) as error:
                uncertain = True
                gone = isinstance(error, BucketGone | NoKeyValue | NotResumable)
                if self._clock.now() - began >= (_RETURN_S if gone else _PATIENCE_S):
                    raise JournalUnavailable(f"the stream could not be written down: {error}") from error
            await self._clock.sleep(_PAUSE_S)

    async def remove(self, stream: str, parts: Sequence[str], revision: int | None) -> None:
        """revision: of the state that goes; None where it has expired already. What has been written since stays, and
        what cannot be removed goes in its time."""
        with contextlib.suppress(BusError, NotResumable, JournalUnavailable):
            states, kept = await self._open()
            if revision is not None:
                await states.delete(stream, revision)
            for name in ("request", *parts):
                await kept.delete(f"{stream}.{name}")

    async def _open(self) -> tuple[KeyValue, KeyValue]:
        async with self._opening:
            if self._opened is None:
                try:
                    states = await self._bus.bucket(self._states_bucket)
                    self._opened = states, await self._bus.bucket(self._parts_bucket)
                except NoKeyValue as error:
                    raise NotResumable from error
            return self._opened
