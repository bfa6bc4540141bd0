"""The sending half that backends share: connect to one boot of a peer, sign headers, read answers."""

from collections.abc import Callable

from shared.protocol.packing import as_json
from shared.protocol.wire import WireModel
from shared.runtime.errors import Corrupt, GeometryMismatch, PeerLost, TransferError, TransferRefused
from shared.state.layout import PoolLayout
from shared.state.remap import Fit, fit_between
from shared.transfer.backend import Event, Manifest
from shared.transfer.connection import Connection
from shared.transfer.formats.catalog import EXACT
from shared.transfer.link import Piece
from shared.transfer.pool import Pool, Run
from shared.transfer.wire import YES, Answer, Greeting, Header, Hello, WirePiece, parse, sign

_EVENT_POLL_S = 0.02


def introduce(
    connection: Connection, boot_id: str, layout: PoolLayout, fd: int | None = None, also: WireModel | None = None
) -> tuple[bytes, Fit | None]:
    """Greets the peer, says `also` what its backend wants to know, and returns the connection's nonce, and where our
    state goes in the peer's if that cuts it otherwise. Raises PeerLost if it is another boot than `boot_id`,
    TransferRefused if it does not want us. The connection is closed on every failure."""
    try:
        hello = connection.receive(Hello)
        if hello.boot_id != boot_id:
            raise PeerLost(f"the peer restarted: it is {hello.boot_id} now, not {boot_id}")
        connection.send(Greeting(layout=layout), fd=fd)
        if also is not None:
            connection.send(also)
        expect_ok(connection)
        return hello.nonce, fit_between(layout, hello.layout)
    except GeometryMismatch as error:
        connection.close()
        raise TransferRefused(f"geometry: {error.message}") from error
    except BaseException:
        connection.close()
        raise


def expect_ok(connection: Connection) -> None:
    """Reads an answer; TransferRefused if it is a no, Corrupt if what came was damaged."""
    body = connection.receive_frame()
    if body == YES:
        return
    answer = parse(Answer, body)
    if not answer.ok:
        raise (Corrupt if answer.reason == Corrupt.code else TransferRefused)(answer.message or answer.reason)


def runs_of(pool: Pool, pieces: tuple[Piece, ...]) -> list[Run]:
    """The source units of each piece, or TransferRefused if our own pool has no such units."""
    runs = []
    for piece in pieces:
        known = 0 <= piece.component < len(pool.layout.components)
        layers = piece.layers(pool.num_layers(piece.component)) if known else range(0)
        run = Run(piece.component, piece.units, piece.rows_in_last, layers)
        if not known or not pool.holds(run):
            raise TransferRefused(f"bad_source: component {run.component} has no such units, rows or layers here")
        runs.append(run)
    return runs


def travelling(fit: Fit | None, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Those that go to the peer: another rank may bring it the others."""
    if fit is None:
        return pieces
    count = len(fit.components)
    return tuple(piece for piece in pieces if not 0 <= piece.component < count or fit.travels(piece.component))


def wire_pieces(pool: Pool, pieces: tuple[Piece, ...], *, with_units: bool) -> tuple[WirePiece, ...]:
    """What a header says of pieces of components that the source has."""
    layers = (piece.layers(pool.num_layers(piece.component)) for piece in pieces)
    return tuple(
        WirePiece(
            component=piece.component,
            first_layer=some.start,
            num_layers=len(some),
            first_unit=piece.first_unit,
            num_units=len(piece.units),
            rows_in_last=piece.rows_in_last,
            units=piece.units if with_units else (),
        )
        for piece, some in zip(pieces, layers, strict=True)
    )


def header_frame(
    manifest: Manifest,
    pieces: tuple[WirePiece, ...],
    nonce: bytes,
    sequence: int,
    *,
    bursts: tuple[int, int] = (0, 0),
    wire_format: str = EXACT,
) -> bytes:
    """The signed header of one transfer. bursts: their length and number, where the receiver waits before each."""
    key = manifest.key
    header = Header(
        room=key.room,
        generation=key.generation,
        sequence=sequence,
        burst_bytes=bursts[0],
        num_bursts=bursts[1],
        pieces=pieces,
        wire_format=wire_format,
    )
    raw = as_json(header)
    return sign(manifest.secret, nonce, sequence, raw) + raw


def wait_for(event: Event, is_aborted: Callable[[], bool]) -> None:
    """Returns once the source is complete; raises TransferError if the transfer is aborted first."""
    while not event.wait(_EVENT_POLL_S):
        if is_aborted():
            raise TransferError("aborted before the source was complete")
