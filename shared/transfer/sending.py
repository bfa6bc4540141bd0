"""The sending half that backends share: connect to one boot of a peer, sign headers, read answers."""

from collections.abc import Callable

from shared.protocol.messages import WireModel
from shared.runtime.errors import PeerLost, TransferError, TransferRefused
from shared.state.layout import PoolLayout
from shared.transfer.backend import Event, Manifest
from shared.transfer.pool import Pool, Run
from shared.transfer.wire import Answer, Connection, Greeting, Header, Hello, WirePiece, sign

_EVENT_POLL_S = 0.02


def introduce(
    connection: Connection, boot_id: str, layout: PoolLayout, fd: int | None = None, also: WireModel | None = None
) -> bytes:
    """Greets the peer, says `also` what its backend wants to know, and returns the connection's nonce. Raises PeerLost
    if it is another boot than `boot_id`, TransferRefused if it does not want us. The connection is closed on every
    failure."""
    try:
        hello = connection.receive(Hello)
        if hello.boot_id != boot_id:
            raise PeerLost(f"the peer restarted: it is {hello.boot_id} now, not {boot_id}")
        connection.send(Greeting(layout=layout), fd=fd)
        if also is not None:
            connection.send(also)
        expect_ok(connection)
    except BaseException:
        connection.close()
        raise
    return hello.nonce


def expect_ok(connection: Connection) -> None:
    """Reads an answer; TransferRefused if it is a no."""
    answer = connection.receive(Answer)
    if not answer.ok:
        raise TransferRefused(answer.message or answer.reason)


def runs_of(pool: Pool, manifest: Manifest) -> list[Run]:
    """The source units of each piece, or TransferRefused if our own pool has no such units."""
    runs = [Run(piece.component, piece.units, piece.rows_in_last) for piece in manifest.pieces]
    for run in runs:
        if not pool.holds(run):
            raise TransferRefused(f"bad_source: component {run.component} has no such units or rows here")
    return runs


def header_frame(manifest: Manifest, pool: Pool, nonce: bytes, sequence: int, *, with_units: bool) -> bytes:
    """The signed header of one transfer."""
    pieces = tuple(
        WirePiece(
            component=piece.component,
            num_layers=pool.num_layers(piece.component),
            first_unit=piece.first_unit,
            num_units=len(piece.units),
            rows_in_last=piece.rows_in_last,
            units=piece.units if with_units else (),
        )
        for piece in manifest.pieces
    )
    key = manifest.key
    header = Header(room=key.room, generation=key.generation, sequence=sequence, pieces=pieces)
    raw = header.model_dump_json().encode()
    return sign(manifest.secret, nonce, sequence, raw) + raw


def wait_for(event: Event, is_aborted: Callable[[], bool]) -> None:
    """Returns once the source is complete; raises TransferError if the transfer is aborted first."""
    while not event.wait(_EVENT_POLL_S):
        if is_aborted():
            raise TransferError("aborted before the source was complete")
