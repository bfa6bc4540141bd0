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


def send(fd: int, data: np.ndarray, spans: np.ndarray) -> None:
    """Sends the spans (int64 [n, 2]: first byte, length) of `data`, flat bytes, one after the other. The socket blocks;
    raises PeerLost when the peer is gone, TransferTimeout when its time limit passed and nothing moved."""
    _move(_sendmsg, fd, _iovecs(data, spans), socket.MSG_NOSIGNAL, "reading")


def receive(fd: int, data: np.ndarray, spans: np.ndarray) -> None:
    """Fills the spans of `data`; as `send`."""
    if not data.flags.writeable:
        raise ValueError("the buffer cannot be written")
    _move(_recvmsg, fd, _iovecs(data, spans), socket.MSG_WAITALL, "sending")


def _iovecs(data: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """A copy with addresses, as the kernel takes them. It outlives no call, and so the buffer outlives it."""
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError("a buffer is flat bytes")
    if len(spans) and (spans.min() < 0 or (spans[:, 0] + spans[:, 1]).max() > len(data)):
        raise ValueError("a span lies outside its buffer")
    found = np.ascontiguousarray(spans[spans[:, 1] > 0], dtype=np.int64)
    found[:, 0] += data.__array_interface__["data"][0]
    return found


def _move(call: _Call, fd: int, iovecs: np.ndarray, flags: int, doing: str) -> None:
    message, first, at = _Message(), iovecs.ctypes.data, 0
    while at < len(iovecs):
        message.iov = first + at * iovecs.strides[0]
        message.iov_len = min(_IOVECS, len(iovecs) - at)
        moved = call(fd, ctypes.byref(message), flags)
        if moved > 0:
            at = _advance(iovecs, at, moved)
        elif moved == 0:
            raise PeerLost("connection closed")
        else:
            _check(ctypes.get_errno(), doing)


def _check(number: int, doing: str) -> None:
    """Returns where the call is to be made again."""
    if number in (errno.EAGAIN, errno.EWOULDBLOCK):
        raise TransferTimeout(f"the peer stopped {doing}")
    if number != errno.EINTR:
        raise PeerLost(f"connection lost: {os.strerror(number)}")


def _advance(iovecs: np.ndarray, at: int, moved: int) -> int:
    """The first that is not done after `moved` more bytes; one that is partly done is cut."""
    ends = np.cumsum(iovecs[at : at + _IOVECS, 1])
    done = int(np.searchsorted(ends, moved, side="right"))
    left = moved - (int(ends[done - 1]) if done else 0)
    if left:
        iovecs[at + done] += (left, -left)
    return at + done
