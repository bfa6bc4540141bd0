"""The key-value memory over JetStream. It knows nats-py's part for it, as `nats_connection.py` knows the rest.

A bucket is one stream of the server, kept on its disk, so that a server that is started again still has it.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import nats.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js import errors as js_errors
from nats.js.api import StorageType
from nats.js.kv import KeyValue as NatsPyKeyValue

from shared.bus.kv import Bucket, BucketGone, Entry, KvConflict, KvError, KvFull, NoKeyValue, check_bucket, check_entry
from shared.bus.nats_connection import map_nats_errors

_TIMEOUT_S = 2.0
_IN_USE = 10058
"""Of the server: a stream of that name is there with other settings."""
_WRONG_LAST = (10071, 10164)
"""The entry is at another revision."""
_FULL = (10077, 10047, 10023, 10028)
"""The stream is full, or what the server lends to all streams is."""


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    """JetStream's own errors first, then what every call may meet."""
    with map_nats_errors(what):
        try:
            yield
        except js_errors.KeyWrongLastSequenceError as error:
            raise KvConflict(f"{what}: somebody else wrote it, or it is gone") from error
        except (js_errors.NoStreamResponseError, js_errors.BucketNotFoundError) as error:
            raise BucketGone(f"{what}: the bucket is gone") from error
        except (js_errors.NoKeysError, nats.errors.NoRespondersError) as error:
            raise NoKeyValue(f"{what}: this NATS server has no JetStream") from error
        except js_errors.APIError as error:
            raise _by_code(what, error) from error


def _by_code(what: str, error: js_errors.APIError) -> KvError:
    if error.err_code in _FULL:
        return KvFull(f"{what}: {error.description}")
    if isinstance(error, js_errors.NotFoundError):
        return BucketGone(f"{what}: {error.description}")
    if isinstance(error, js_errors.ServiceUnavailableError):
        return NoKeyValue(f"{what}: this NATS server has no JetStream")
    return KvError(f"{what}: {error.description}")


class NatsKeyValue:
    """client: the connection's present client, which another may replace. Made by `open_bucket`."""

    def __init__(self, bucket: Bucket, client: Callable[[], Client]) -> None:
        self._bucket = bucket
        self._client = client

    async def get(self, key: str) -> Entry | None:
        check_entry(key)
        with _mapped(f"get {key}"):
            try:
                found = await self._inner().get(key)
            except js_errors.KeyNotFoundError:
                return None
            return Entry(found.value or b"", found.revision or 0)

    async def create(self, key: str, value: bytes) -> int:
        check_entry(key, value)
        with _mapped(f"create {key}"), _cancellable():
            return await self._inner().create(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        check_entry(key, value)
        with _mapped(f"update {key}"), _cancellable():
            return await self._inner().update(key, value, last=revision)

    async def delete(self, key: str, revision: int | None = None) -> None:
        check_entry(key)
        with _mapped(f"delete {key}"), _cancellable():
            try:
                await self._inner().delete(key, last=revision)
            except js_errors.BadRequestError as error:
                if error.err_code not in _WRONG_LAST:
                    raise
                raise KvConflict(f"{key} is not at revision {revision}") from error

    def _inner(self) -> NatsPyKeyValue:
        """Needs no word with the server: the names are JetStream's convention."""
        name = self._bucket.name
        return NatsPyKeyValue(name, f"KV_{name}", f"$KV.{name}.", _context(self._client()), direct=False)


@contextmanager
def _cancellable() -> Iterator[None]:
    """nats-py swallows a cancellation that arrives while it waits for its flusher."""
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > cancels:
        raise asyncio.CancelledError


def _context(client: Client) -> JetStreamContext:
    return client.jetstream(timeout=_TIMEOUT_S)


async def open_bucket(bucket: Bucket, client: Callable[[], Client]) -> NatsKeyValue:
    """The bucket, made where it is not there, with these settings. NoKeyValue from a server without JetStream."""
    check_bucket(bucket)
    with _mapped(f"open {bucket.name}"):
        context = _context(client())
        try:
            await context.create_key_value(
                bucket=bucket.name, ttl=bucket.ttl_s, max_bytes=bucket.max_bytes, storage=StorageType.FILE
            )
        except js_errors.BadRequestError as error:
            if error.err_code != _IN_USE:
                raise
            await _change(context, bucket)
    return NatsKeyValue(bucket, client)


async def _change(context: JetStreamContext, bucket: Bucket) -> None:
    """Another process made it with other settings: the newest word counts."""
    config = (await context.stream_info(f"KV_{bucket.name}")).config
    window = min(bucket.ttl_s, config.duplicate_window or bucket.ttl_s)
    await context.update_stream(
        config.evolve(max_age=bucket.ttl_s, max_bytes=bucket.max_bytes, duplicate_window=window)
    )
