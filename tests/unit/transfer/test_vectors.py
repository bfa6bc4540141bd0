"""Scatter and gather through real sockets."""

import ctypes
import socket
import struct
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from shared.runtime.errors import PeerLost, TransferTimeout
from shared.transfer import vectors as vectors_module
from shared.transfer.vectors import Vectors

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


def a_part(real: Any) -> Any:
    """The system call, as it is where it moves less than it was asked for."""

    def call(fd: int, reference: Any, flags: int) -> int:
        message = reference._obj
        first = (ctypes.c_int64 * 2).from_address(message.iov)
        size, message.iov_len = first[1], 1
        first[1] = min(size, 777)
        moved = int(real(fd, reference, flags))
        first[1] = size
        return moved

    return call


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("there", "here"), [(1, 1), (2500, 1), (1, 2500), (1000, 1001), (2001, 3)])
@pytest.mark.parametrize("calls", [1, 7])
def test_spans_arrive_in_order_however_they_are_cut(
    sockets: Sockets, there: int, here: int, calls: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in () if whole else ("_sendmsg", "_recvmsg"):
        monkeypatch.setattr(vectors_module, name, a_part(getattr(vectors_module, name)))
    random, total = np.random.default_rng(there + here), 300_000
    source = random.integers(0, 255, SIZE, dtype=np.uint8)
    target = np.full(SIZE, 255, dtype=np.uint8)
    out, into = cut(random, total, there), cut(random, total, here)

    def send() -> None:
        vectors = Vectors(source, out)
        for first, end in pairwise(np.linspace(0, there, calls + 1).astype(int).tolist()):
            vectors.send(sockets[0].fileno(), first, end)

    sending = threading.Thread(target=send)
    sending.start()
    vectors = Vectors(target, into)
    for first, end in pairwise(np.linspace(0, here, calls + 1).astype(int).tolist()):
        vectors.receive(sockets[1].fileno(), first, end)
    sending.join()
    assert joined(target, into) == joined(source, out)
    assert (target == 255).sum() == SIZE - total, "nothing else was written"


def test_nothing_to_move_is_no_call(sockets: Sockets) -> None:
    Vectors(np.zeros(8, dtype=np.uint8), np.empty((0, 2), dtype=np.int64)).send(-1, 0, 0)
    Vectors(np.zeros(8, dtype=np.uint8), np.array([[3, 4]], dtype=np.int64)).receive(-1, 1, 1)


@pytest.mark.parametrize("span", [(-1, 4), (0, -1), (5, 4), (9, 1), (1 << 62, 1)])
def test_a_span_outside_its_buffer_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="outside"):
        Vectors(np.zeros(8, dtype=np.uint8), np.array([(0, 8), span], dtype=np.int64))


def test_what_cannot_be_written_is_not(sockets: Sockets) -> None:
    vectors = Vectors(np.frombuffer(bytes(8), dtype=np.uint8), np.array([(0, 8)], dtype=np.int64))
    with pytest.raises(ValueError, match="written"):
        vectors.receive(sockets[0].fileno(), 0, 1)


def test_a_peer_that_is_gone_and_one_that_is_silent(sockets: Sockets) -> None:
    near, far = sockets
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 50_000))
    data, spans = np.zeros(SIZE, dtype=np.uint8), np.array([(0, SIZE)], dtype=np.int64)
    with pytest.raises(TransferTimeout, match="sending"):
        Vectors(data, spans).receive(near.fileno(), 0, 1)
    with pytest.raises(TransferTimeout, match="reading"):
        Vectors(data, spans).send(near.fileno(), 0, 1)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost, match="closed"):
        Vectors(data, spans).receive(near.fileno(), 0, 1)
    far.close()
    with pytest.raises(PeerLost, match="lost"):
        Vectors(data, spans).send(near.fileno(), 0, 1)
