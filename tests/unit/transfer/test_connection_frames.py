"""Whether a frame is there is told without blocking, and only of a whole one."""

import socket
from collections.abc import Iterator

import pytest

from shared.runtime.errors import PeerLost
from shared.transfer.connection import Connection
from shared.transfer.wire import MAX_FRAME_BYTES, Malformed

FRAME = (5).to_bytes(4, "big") + b"12345"


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, Connection]]:
    if request.param == "unix":
        theirs, ours = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            theirs = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(ours, 60)
    yield theirs, connection
    connection.close()
    theirs.close()


@pytest.mark.parametrize("there", range(len(FRAME)))
def test_a_part_of_a_frame_is_none(pair: tuple[socket.socket, Connection], there: int) -> None:
    theirs, connection = pair
    theirs.sendall(FRAME[:there])
    assert not connection.wait_awake(0.01)
    theirs.sendall(FRAME[there:])
    assert connection.wait_awake(60)
    assert connection.receive_frame() == b"12345"
    assert not connection.wait_awake(0)


def test_a_frame_of_nothing_is_one_and_so_is_one_with_another_behind_it(
    pair: tuple[socket.socket, Connection],
) -> None:
    theirs, connection = pair
    theirs.sendall(bytes(4) + FRAME[:6])
    assert connection.wait_awake(60)
    assert connection.receive_frame() == b""
    assert not connection.wait_awake(0.01)


def test_a_frame_that_is_too_long_is_not_waited_for(pair: tuple[socket.socket, Connection]) -> None:
    theirs, connection = pair
    theirs.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    assert connection.wait_awake(60)
    with pytest.raises(Malformed):
        connection.receive_frame()


def test_a_peer_that_is_gone_is_not_waited_for(pair: tuple[socket.socket, Connection]) -> None:
    theirs, connection = pair
    theirs.close()
    assert connection.wait_awake(60)
    with pytest.raises(PeerLost):
        connection.receive_frame()
