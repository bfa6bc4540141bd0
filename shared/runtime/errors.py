"""Every failure Baton knows, as one tree.

BatonError
  ProtocolError        the wire: StaleGeneration, IdentityMismatch, GeometryMismatch, UnknownRoom, DeadRoom
  CapacityError        no room now: TicketDenied, PoolExhausted, QueueFull, NoWorker, ShuttingDown
  TransferError        bytes: PeerLost, Corrupt, TransferTimeout, TransferRefused
  StoreError           the external store: StoreFull, StoreUnavailable
  PrefixGone           a worker's pool: less of a prompt than was thought
  EngineError          compute failed
  StreamError          streams cannot be resumed: NotResumable, JournalUnavailable
  RequestError         the request itself: InvalidRequest, ModelNotFound, StreamNotFound, StreamMoved, Cancelled,
                       DeadlineExceeded

Each leaf has a `code` that travels on the wire, an HTTP status, and says whether trying again may help.
A peer's failure arrives as data (`code` and `message`) and becomes the same class again by `error_from_code`.
"""

from typing import ClassVar


class BatonError(Exception):
    """Base of all; a bare BatonError is an internal error."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str = "", *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or type(self).__name__).strip())
        self.message = str(self)
        self.param = param
        self.retry_after_s = retry_after_s
        self.by = ""
        """The leg to blame (`prefill`, `decode`), where whoever raises it knows better than whoever catches it."""


class ProtocolError(BatonError):
    """A peer broke the protocol."""

    code = "protocol_error"


class StaleGeneration(ProtocolError):
    """The message belongs to an older attempt."""

    code = "stale_generation"


class IdentityMismatch(ProtocolError):
    """Two workers hold different weights, formats or tokenizers and refuse each other."""

    code = "identity_mismatch"


class GeometryMismatch(ProtocolError):
    """Two workers cut their state in ways that cannot be converted into each other."""

    code = "geometry_mismatch"


class UnknownRoom(ProtocolError):
    """Nobody here has heard of that ticket."""

    code = "unknown_room"
    retryable = True


class DeadRoom(ProtocolError):
    """That ticket has ended."""

    code = "dead_room"
    retryable = True


class CapacityError(BatonError):
    """Not now."""

    code = "overloaded"
    http_status = 503
    retryable = True


class TicketDenied(CapacityError):
    """The decode worker has no room for the request now."""

    code = "ticket_denied"


class PoolExhausted(CapacityError):
    """No free pages are left."""

    code = "pool_exhausted"


class QueueFull(CapacityError):
    """Too many requests are waiting."""

    code = "queue_full"
    http_status = 429


class NoWorker(CapacityError):
    """No worker that could serve the request is alive."""

    code = "no_worker"


class ShuttingDown(CapacityError):
    """This process is ending and takes nothing on any more."""

    code = "shutting_down"


class TransferError(BatonError):
    """The state could not be moved."""

    code = "transfer_failed"
    retryable = True


class PeerLost(TransferError):
    """The other process is gone."""

    code = "peer_lost"


class Corrupt(TransferError):
    """Digests disagree: the bytes that arrived are not the bytes that were sent."""

    code = "corrupt_state"


class TransferTimeout(TransferError):
    """The transfer took longer than its deadline."""

    code = "transfer_timeout"


class TransferRefused(TransferError):
    """The receiver's sidecar refused the transfer at the door."""

    code = "transfer_refused"


class StoreError(BatonError):
    """The external store could not do it; whoever asked goes on without."""

    code = "store_failed"
    retryable = True


class StoreFull(StoreError):
    """No room is left: the disk is full, or the quota is used up."""

    code = "store_full"


class StoreUnavailable(StoreError):
    """The store, or the device or server beneath it, does not answer or fails."""

    code = "store_unavailable"


class PrefixGone(BatonError):
    """A decode worker has less of a prompt's state than the gateway thought."""

    code = "prefix_gone"
    retryable = True


class EngineError(BatonError):
    """The model could not be computed."""

    code = "engine_error"
    retryable = True


class StreamError(BatonError):
    """Streams cannot be resumed here, or not now."""

    code = "stream_failed"


class NotResumable(StreamError):
    """Streams cannot be resumed here: the NATS server has no JetStream."""

    code = "not_resumable"
    http_status = 501


class JournalUnavailable(StreamError):
    """What a stream has said cannot be written down now."""

    code = "journal_unavailable"
    http_status = 503
    retryable = True


class RequestError(BatonError):
    """The request cannot be served as it stands."""

    code = "invalid_request"
    http_status = 400


class InvalidRequest(RequestError):
    """Something in the request is wrong."""

    code = "invalid_request"


class ModelNotFound(RequestError):
    """That model is not served here."""

    code = "model_not_found"
    http_status = 404


class StreamNotFound(RequestError):
    """There is no such stream, or it has expired."""

    code = "stream_not_found"
    http_status = 404


class StreamMoved(RequestError):
    """The stream is read over another connection now."""

    code = "stream_moved"
    http_status = 409


class Cancelled(RequestError):
    """The client went away or cancelled."""

    code = "cancelled"
    http_status = 499


class DeadlineExceeded(RequestError):
    """The request did not finish before its deadline."""

    code = "deadline_exceeded"
    http_status = 504


def _by_code(cls: type[BatonError]) -> dict[str, type[BatonError]]:
    """Only the classes of this file: an adapter's own subclass is reported under its base."""
    table = {cls.code: cls}
    for sub in cls.__subclasses__():
        if sub.__module__ == __name__:
            table |= _by_code(sub)
    return table


def error_from_code(code: str, message: str) -> BatonError:
    """The error a peer reported; an unknown code becomes an internal error that names it."""
    found = _by_code(BatonError).get(code)
    if found is None:
        return BatonError(f"{code}: {message}")
    return found(message)
