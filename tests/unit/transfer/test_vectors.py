"""Scatter and gather through real sockets."""

import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shared.runtime.errors import PeerLost, TransferTimeout
from shared.transfer import vectors

SIZE = 1 << 20
Sockets = tuple[socket.socket, socket.socket]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """With buffers so small that every call moves a part, and with a time limit."""
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", 10, 0))
    with near, far:
        yield near, far


def cut(random: np.random.Generator, total: int, count: int) -> np.ndarray:
    """Spans of `total` bytes altogether, in any order, none of which touch."""
    lengths = np.diff(np.sort(random.choice(total - 1, count - 1, replace=False)) + 1, prepend=0, append=total)
    begins = np.cumsum(lengths + 3) - lengths
    return random.permutation(np.stack((begins, lengths), axis=1).astype(np.int64))


def joined(data: np.ndarray, spans: np.ndarray) -> bytes:
    return b"".join(data[begin : begin + size].tobytes() for begin, size in spans.tolist())


@pytest.mark.parametrize(("there", "here"), [(1, 1), (2500, 1), (1, 2500), (1000, 1001), (2001, 3)])
def test_spans_arrive_in_order_however_they_are_cut(sockets: Sockets, there: int, here: int) -> None:
    random, total = np.random.default_rng(there + here), 300_000
    source = random.integers(0, 255, SIZE, dtype=np.uint8)
    target = np.full(SIZE, 255, dtype=np.uint8)
    out, into = cut(random, total, there), cut(random, total, here)
    sending = threading.Thread(target=vectors.send, args=(sockets[0].fileno(), source, out))
    sending.start()
    vectors.receive(sockets[1].fileno(), target, into)
    sending.join()
    assert joined(target, into) == joined(source, out)
    assert (target == 255).sum() == SIZE - total, "nothing else was written"


def test_nothing_to_move_is_no_call(sockets: Sockets) -> None:
    vectors.send(sockets[0].fileno(), np.zeros(8, dtype=np.uint8), np.empty((0, 2), dtype=np.int64))
    vectors.receive(sockets[1].fileno(), np.zeros(8, dtype=np.uint8), np.array([[3, 0]], dtype=np.int64))


@pytest.mark.parametrize("span", [(-1, 4), (0, -1), (5, 4), (9, 1), (1 << 62, 1)])
def test_a_span_outside_its_buffer_moves_nothing(sockets: Sockets, span: tuple[int, int]) -> None:
    data = np.zeros(8, dtype=np.uint8)
    for move in (vectors.send, vectors.receive):
        with pytest.raises(ValueError, match="outside"):
            move(sockets[0].fileno(), data, np.array([(0, 8), span], dtype=np.int64))
    sockets[0].setblocking(False)
    sockets[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        sockets[1].recv(1)


def test_what_cannot_be_written_is_not(sockets: Sockets) -> None:
    data = np.frombuffer(bytes(8), dtype=np.uint8)
    with pytest.raises(ValueError, match="written"):
        vectors.receive(sockets[0].fileno(), data, np.array([(0, 8)], dtype=np.int64))


def test_a_peer_that_is_gone_and_one_that_is_silent(sockets: Sockets) -> None:
    near, far = sockets
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
    data, spans = np.zeros(SIZE, dtype=np.uint8), np.array([(0, SIZE)], dtype=np.int64)
    with pytest.raises(TransferTimeout, match="sending"):
        vectors.receive(near.fileno(), data, spans)
    with pytest.raises(TransferTimeout, match="reading"):
        vectors.send(near.fileno(), data, spans)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost, match="closed"):
        vectors.receive(near.fileno(), data, spans)
    far.close()
    with pytest.raises(PeerLost, match="lost"):
        vectors.send(near.fileno(), data, spans)
