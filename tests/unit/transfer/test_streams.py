"""Large transfers over several streams: what each of them moves, and how one ends the others."""

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shared.runtime.errors import PeerLost, TransferError
from shared.state.components import IndexKind, StateComponent
from shared.transfer.backend import ALWAYS, Begun, Digests, Event, Manifest, Turn
from shared.transfer.connection import Connection
from shared.transfer.digester import DIGEST_BYTES
from shared.transfer.link import Piece
from shared.transfer.streams import Connect, Streams, _InTurn
from tests.contract.transfer_links import new_ticket

COMPONENTS = (
    StateComponent("kv", IndexKind.PAGE, 4, (2,), (1 << 15,), "float32", (0, 1, 2)),
    StateComponent("slots", IndexKind.REQUEST, 1, (), (8,), "float32", (0, 1)),
)


LARGE = Piece(0, 0, tuple(range(12)), 4)
"""36 MiB: three streams and more."""
DEADLINE_S = 30


class Way:
    """A channel that does with a transfer what the test says."""

    fit = None

    def __init__(self, send: Callable[[Manifest], None] = lambda manifest: None) -> None:
        self._send = send
        self.moved: list[Piece] = []
        self.aborted = threading.Event()

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        self._send(manifest)
        self.moved += manifest.pieces
        return [[np.zeros((len(piece.units), DIGEST_BYTES), dtype=np.uint8)] * 3 for piece in manifest.pieces]

    def begin(self, manifest: Manifest) -> Begun | None:
        return None

    def abort(self) -> None:
        self.aborted.set()

    def is_idle(self) -> bool:
        return not self.aborted.is_set()

    def close(self) -> None: ...


class Closed:
    """A turn that never comes."""

    burst_bytes, window_bytes = 1 << 20, 10

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def wait(self, num_bytes: int) -> None:
        assert self.aborted.wait(DEADLINE_S)
        raise TransferError("aborted before its turn")

    def at_once(self, num_bytes: int) -> bool:
        return False

    def abort(self) -> None:
        self.aborted.set()


def streams_of(*ways: Way, most: int = 3) -> Streams:
    further = iter(ways[1:])

    def connect(on_open: Callable[[Connection], None]) -> Way:
        try:
            return next(further)
        except StopIteration:
            raise PeerLost("no more of them") from None

    return Streams(ways[0], connect, most, COMPONENTS)


def move(streams: Streams, turn: Turn = ALWAYS) -> Digests:
    now = threading.Event()
    now.set()
    return streams.transfer(Manifest(*new_ticket(), (LARGE,), turn=turn), now)


@pytest.mark.parametrize("there", [1, 2, 3])
def test_the_parts_go_over_as_many_streams_as_there_are(there: int) -> None:
    ways = [Way() for _ in range(there)]
    digests = move(streams_of(*ways))
    assert [len(layer) for layer in digests[0]] == [12] * 3
    assert [[unit for piece in way.moved for unit in piece.units] for way in ways] == [
        list(range(12 * k // there, 12 * (k + 1) // there)) for k in range(there)
    ]


@pytest.mark.parametrize("which", [0, 2])
def test_a_stream_that_fails_ends_those_that_wait_for_their_turn(which: int) -> None:
    def fail(manifest: Manifest) -> None:
        raise PeerLost("the cable")

    def wait(manifest: Manifest) -> None:
        manifest.turn.wait(1)

    ways = [Way(fail if k == which else wait) for k in range(3)]
    turn = Closed()
    with ThreadPoolExecutor(1) as threads:
        moving = threads.submit(move, streams_of(*ways), turn)
        assert isinstance(moving.exception(DEADLINE_S / 2), PeerLost), "what came of it hides what was wrong"
    assert all(way.aborted.is_set() for way in ways)


def test_a_stream_that_greets_is_aborted_with_the_others() -> None:
    """The peer is silent, so that it would be waited for."""
    ours, theirs = socket.socketpair()
    greeting, first = threading.Event(), Way()

    def connect(on_open: Callable[[Connection], None]) -> Way:
        connection = Connection(ours, DEADLINE_S)
        on_open(connection)
        greeting.set()
        connection.receive_frame()
        raise AssertionError("it greets")

    typed: Connect = connect
    streams = Streams(first, typed, 3, COMPONENTS)
    with ThreadPoolExecutor(1) as threads:
        moving = threads.submit(move, streams)
        assert greeting.wait(DEADLINE_S)
        streams.abort()
        moving.exception(DEADLINE_S / 2)
    assert first.aborted.is_set()
    ours.close()
    theirs.close()


def test_who_is_aborted_already_opens_no_further_stream() -> None:
    ours, theirs = socket.socketpair()

    def connect(on_open: Callable[[Connection], None]) -> Way:
        connection = Connection(ours, DEADLINE_S)
        on_open(connection)
        connection.receive_frame()
        raise AssertionError("it greets")

    streams = Streams(Way(), connect, 3, COMPONENTS)
    streams.abort()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(move, streams).exception(DEADLINE_S / 2)
    ours.close()
    theirs.close()


def test_streams_share_the_window() -> None:
    turn = _InTurn(Closed(), 3)
    assert (turn.window_bytes, turn.burst_bytes) == (4, 1 << 20)
    assert _InTurn(ALWAYS, 3).window_bytes == 0, "any"
