"""Frames and scattered bytes on a socket pair."""

import itertools
import socket
import threading
from collections.abc import Iterator
from random import Random

import pytest

from shared.runtime.errors import PeerLost, TransferRefused, TransferTimeout
from shared.transfer.connection import Connection
from shared.transfer.wire import MAX_FRAME_BYTES, Answer, Header, Malformed, parse


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection, socket.socket]]:
    a, b = socket.socketpair()
    left, right = Connection(a, 0.2), Connection(b, 0.2)
    yield left, right, a
    left.close()
    right.close()


def test_bytes_are_gathered_and_scattered_in_any_cut(pair: tuple[Connection, Connection, socket.socket]) -> None:
    left, right, _ = pair
    random = Random(3)
    data = random.randbytes(4_000_000)

    def cut() -> list[int]:
        places = sorted(random.sample(range(1, len(data)), 2500))
        return [0, *places, len(data)]

    def pieces(buffer: memoryview) -> list[memoryview]:
        places = cut()
        return [buffer[a:b] for a, b in itertools.pairwise(places)]

    sending = threading.Thread(target=left.send_all, args=(pieces(memoryview(data)),))
    sending.start()
    target = bytearray(len(data))
    right.receive_all(pieces(memoryview(target)))
    sending.join()
    assert target == data


def test_a_frame_arrives_whole(pair: tuple[Connection, Connection, socket.socket]) -> None:
    left, right, _ = pair
    left.send(Answer(ok=False, reason="why", message="because"))
    left.send_frame(b"")
    assert right.receive(Answer) == Answer(ok=False, reason="why", message="because")
    assert right.receive_frame() == b""


def test_a_huge_frame_is_refused_before_it_is_read(pair: tuple[Connection, Connection, socket.socket]) -> None:
    _, right, raw = pair
    raw.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(Malformed):
        right.receive_frame()


def test_a_huge_frame_is_not_sent(pair: tuple[Connection, Connection, socket.socket]) -> None:
    left, right, _ = pair
    with pytest.raises(TransferRefused, match="too_long"):
        left.send_frame(bytes(MAX_FRAME_BYTES + 1))
    sending = threading.Thread(target=left.send_frame, args=(bytes(MAX_FRAME_BYTES),))
    sending.start()
    assert right.receive_frame() == bytes(MAX_FRAME_BYTES)
    sending.join()


def test_silence_is_a_time_out_unless_it_may_wait(pair: tuple[Connection, Connection, socket.socket]) -> None:
    left, right, raw = pair
    with pytest.raises(TransferTimeout):
        right.receive_frame()
    raw.sendall(b"\0\0")
    with pytest.raises(TransferTimeout):
        right.receive_frame(may_wait=True)
    late = threading.Timer(0.5, left.send_frame, args=(b"late",))
    late.start()
    assert right.receive_frame(may_wait=True) == b"late"


def test_a_peer_that_leaves_is_lost(pair: tuple[Connection, Connection, socket.socket]) -> None:
    left, right, _ = pair
    assert right.is_idle()
    left.close()
    assert not right.is_idle()
    with pytest.raises(PeerLost):
        right.receive_frame()
    with pytest.raises(PeerLost):
        right.send_frame(b"x" * 100)


def test_abort_wakes_a_thread_that_blocks() -> None:
    a, b = socket.socketpair()
    left, right = Connection(a, 60), Connection(b, 60)
    waking = threading.Timer(0.1, right.abort)
    waking.start()
    with pytest.raises(PeerLost):
        right.receive_frame()
    left.close()
    right.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[" * 5000,
        b'{"room":0,"generation":1,"sequence":0,"pieces":[]}',
        b'{"room":1,"generation":0,"sequence":0,"pieces":[]}',
        b'{"room":1,"generation":1,"sequence":0,"pieces":[],"more":1}',
        b'{"room":1,"generation":1,"sequence":1e999,"pieces":[]}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_header_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse(Header, data)
