"""The protocol to Redis over a socket whose other end the test holds."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shared.runtime.errors import StoreUnavailable
from shared.store.resp import Refusal, RespConnection, begun, command


@pytest.fixture
def ends() -> Iterator[tuple[RespConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield RespConnection(ours, "test"), theirs


Ends = tuple[RespConnection, socket.socket]


def say(theirs: socket.socket, data: bytes, at_a_time: int) -> threading.Thread:
    """Byte by byte, as a network may."""

    def work() -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # we may have had enough
            for start in range(0, len(data), at_a_time):
                theirs.sendall(data[start : start + at_a_time])

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 1000])
def test_replies_in_any_cut(ends: Ends, at_a_time: int) -> None:
    connection, theirs = ends
    said = b"+OK\r\n:-12\r\n$-1\r\n$0\r\n\r\n$4\r\na\r\nb\r\n*2\r\n$1\r\n0\r\n*1\r\n$2\r\nxy\r\n-OOM no room\r\n"
    thread = say(theirs, said, at_a_time)
    assert [connection.reply() for _ in range(7)] == [
        b"OK",
        -12,
        None,
        b"",
        b"a\r\nb",
        [b"0", [b"xy"]],
        Refusal("OOM no room"),
    ]
    assert connection.in_step
    thread.join()


@pytest.mark.parametrize("at_a_time", [1, 7, 5000, 100_000])
def test_a_value_goes_into_its_pieces(ends: Ends, at_a_time: int) -> None:
    connection, theirs = ends
    data = bytes(range(256)) * 40
    thread = say(theirs, b"$%d\r\n%b\r\n+next\r\n" % (len(data), data), at_a_time)
    assert connection.value() == len(data)
    assert not connection.in_step
    assert connection.take(100) == data[:100]
    room = bytearray(len(data) - 100)
    view = memoryview(room)
    connection.into([view[:1], view[1:1], view[1:3000]])
    assert not connection.in_step
    connection.into([view[3000:]])
    assert room == data[100:]
    assert connection.reply() == b"next"
    assert connection.in_step
    thread.join()


@pytest.mark.parametrize(("said", "found"), [(b"$-1\r\n", None), (b"-WRONGTYPE x\r\n", Refusal("WRONGTYPE x"))])
def test_a_value_that_is_none(ends: Ends, said: bytes, found: Refusal | None) -> None:
    connection, theirs = ends
    theirs.sendall(said)
    assert connection.value() == found
    assert connection.in_step


def test_an_empty_value(ends: Ends) -> None:
    connection, theirs = ends
    theirs.sendall(b"$0\r\n\r\n+next\r\n")
    assert connection.value() == 0
    assert connection.take(0) == b""
    assert connection.reply() == b"next"


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n", b"x" * 200_000, b"$abc\r\n", b"*x\r\n", b":\r\n"])
def test_what_is_not_redis_is_said(ends: Ends, said: bytes) -> None:
    connection, theirs = ends
    thread = say(theirs, said, 10_000)
    with pytest.raises(StoreUnavailable, match="does not speak Redis' protocol"):
        connection.reply()
    connection.abort()
    connection.close()
    thread.join()


def test_an_end_in_the_middle(ends: Ends) -> None:
    connection, theirs = ends
    theirs.sendall(b"$10\r\nabc")
    theirs.close()
    assert connection.value() == 10
    with pytest.raises(StoreUnavailable, match="lost"):
        connection.into([memoryview(bytearray(10))])
    assert not connection.in_step


def test_an_abort_from_elsewhere_ends_a_wait(ends: Ends) -> None:
    connection, _ = ends
    timer = threading.Timer(0.05, connection.abort)
    timer.start()
    with pytest.raises(StoreUnavailable, match="lost"):
        connection.reply()
    timer.join()


def test_what_is_sent(ends: Ends) -> None:
    connection, theirs = ends
    assert command(b"GET", b"a b") == b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n"
    connection.send([begun(b"SET", b"k", size=3), memoryview(b"ab"), b"", b"c", b"\r\n"])
    assert theirs.recv(1000) == command(b"SET", b"k", b"abc")


def test_more_pieces_than_one_call_takes(ends: Ends) -> None:
    connection, theirs = ends
    data = bytes(range(250)) * 100
    found: list[bytes] = []

    def read() -> None:
        found.append(theirs.recv(len(data), socket.MSG_WAITALL))

    thread = threading.Thread(target=read)
    thread.start()
    connection.send([memoryview(data)[k : k + 5] for k in range(0, len(data), 5)])
    thread.join()
    assert found == [data]


def test_a_connection_that_died_meanwhile_is_not_idle(ends: Ends) -> None:
    connection, theirs = ends
    assert connection.is_idle()
    theirs.close()
    assert not connection.is_idle()
