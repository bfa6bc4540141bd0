"""Scatter and gather between a socket and stretches of one buffer, a thousand with each system call.

Stretches are rows of a numpy array, because a Python object for each page would cost as much as small pages do.
"""

import ctypes
import errno
import os
import socket
from collections.abc import Callable

import numpy as np

from shared.runtime.errors import PeerLost, TransferTimeout

_IOVECS = 1000


class _Message(ctypes.Structure):
    """msghdr of 64-bit Linux."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_len", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_len", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_len", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_Call = Callable[..., int]
_libc = ctypes.CDLL(None, use_errno=True)


def _declared(name: str) -> _Call:
    call = getattr(_libc, name)
    call.argtypes = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int)
    call.restype = ctypes.c_ssize_t
    found: _Call = call
    return found


_sendmsg, _recvmsg = _declared("sendmsg"), _declared("recvmsg")


class Vectors:
    """Spans (int64 [n, 2]: first byte, length) of `data`, flat bytes, as the kernel takes them. Each may be moved once.
    ValueError for a span outside."""

    def __init__(self, data: np.ndarray, spans: np.ndarray) -> None:
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise ValueError("a buffer is flat bytes")
        if len(spans) and (spans.min() < 0 or (spans[:, 0] + spans[:, 1]).max() > len(data)):
            raise ValueError("a span lies outside its buffer")
        self._data = data  # it must not go while its addresses are in use
        self._iovecs = np.array(spans, dtype=np.int64, order="C").reshape(-1, 2)
        self._iovecs[:, 0] += data.__array_interface__["data"][0]
        self._first = self._iovecs.ctypes.data
        self._ends = np.cumsum(self._iovecs[:, 1])
        self._message = _Message()

    def __len__(self) -> int:
        return len(self._iovecs)

    def send(self, fd: int, first: int, end: int) -> None:
        """Sends the spans numbered [first, end), one after the other. The socket blocks; raises PeerLost when the peer
        is gone, TransferTimeout when its time limit passed and nothing moved."""
        self._move(_sendmsg, fd, first, end, socket.MSG_NOSIGNAL, "reading")

    def receive(self, fd: int, first: int, end: int) -> None:
        """Fills those spans; as `send`."""
        if not self._data.flags.writeable:
            raise ValueError("the buffer cannot be written")
        self._move(_recvmsg, fd, first, end, socket.MSG_WAITALL, "sending")

    def _move(self, call: _Call, fd: int, first: int, end: int, flags: int, doing: str) -> None:
        done = int(self._ends[first - 1]) if first else 0
        goal = int(self._ends[end - 1]) if end else 0
        at, message = first, self._message
        while done < goal:
            message.iov = self._first + at * self._iovecs.strides[0]
            message.iov_len = min(_IOVECS, end - at)
            moved = call(fd, ctypes.byref(message), flags)
            if moved > 0:
                done += moved
                at = self._at(done) if done < goal else end
            elif moved == 0:
                raise PeerLost("connection closed")
            else:
                _check(ctypes.get_errno(), doing)

    def _at(self, done: int) -> int:
        """The span that goes on after so many bytes of all; one that is partly done is cut."""
        at = int(np.searchsorted(self._ends, done, side="right"))
        left = int(self._ends[at]) - done
        begin, size = self._iovecs[at]
        self._iovecs[at] = begin + size - left, left
        return at


def _check(number: int, doing: str) -> None:
    """Returns where the call is to be made again."""
    if number in (errno.EAGAIN, errno.EWOULDBLOCK):
        raise TransferTimeout(f"the peer stopped {doing}")
    if number != errno.EINTR:
        raise PeerLost(f"connection lost: {os.strerror(number)}")
