"""As much of the Redis protocol (RESP 2) as blocks need: a value is sent from its pieces and received into them.

A client library joins the pieces of a value to send it and receives it into buffers of its own: a copy more each way.
"""

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from shared.runtime.errors import StoreUnavailable
from shared.store.parts import after

_PORT = 6379
_IOVECS = 1000
_READ_BYTES = 4096
"""Read at a time while it is not known what comes: so much of a value may be copied once."""
_MOST_LINE_BYTES = 64 << 10
_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that the server answered with. code: its first word."""

    message: str

    @property
    def code(self) -> str:
        return self.message.partition(" ")[0]


Reply: TypeAlias = "bytes | int | Refusal | list[Reply] | None"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """`redis://[[user]:password@]host[:port][/database]`, `rediss://` with TLS (`valkey://` and `valkeys://` are the
    same), or `unix://[[user]:password@]/path`."""

    host: str = ""
    port: int = _PORT
    path: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    tls: bool = False

    @classmethod
    def of(cls, url: SplitResult, database: int = 0) -> Self:
        """ValueError for what is none. The query is the caller's."""
        user, password = unquote(url.username or ""), unquote(url.password or "")
        if url.scheme == "unix":
            if not url.path.startswith("/") or url.hostname:
                raise ValueError("unix:// is followed by an absolute path")
            return cls(path=unquote(url.path), user=user, password=password, database=database)
        if url.scheme not in _SCHEMES or not url.hostname:
            raise ValueError(f"not a Redis address: one begins with {', '.join(f'{name}://' for name in _SCHEMES)}")
        if (number := url.path.strip("/")) and not number.isdecimal():
            raise ValueError(f"a database has a number, and {number!r} is none")
        return cls(
            url.hostname,
            url.port or _PORT,
            user=user,
            password=password,
            database=int(number or database),
            tls=_SCHEMES[url.scheme],
        )

    @classmethod
    def parse(cls, url: str) -> Self:
        return cls.of(urlsplit(url))

    def __str__(self) -> str:
        """For people: without the password."""
        return self.path or f"{self.host}:{self.port}"


class RespConnection:
    """A connected blocking socket, used by one thread; `abort` may be called by any, and is what limits its time.
    Raises StoreUnavailable where the connection is lost."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock, self._name = sock, name
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._ahead = b""
        self._owed = 0

    @classmethod
    def connect(cls, address: RedisAddress, timeout_s: float, tls: ssl.SSLContext | None = None) -> Self:
        """Connected, greeted and logged in."""
        try:
            sock = _connected(address, timeout_s, tls)
        except OSError as error:
            raise StoreUnavailable(f"no connection to Redis at {address}: {error}") from error
        connection = cls(sock, str(address))
        try:
            connection._log_in(address)
            sock.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def in_step(self) -> bool:
        """Whether the next reply is the next command's: no part of a value was left unread."""
        return self._owed == 0 and not self._ahead

    def is_idle(self) -> bool:
        """Whether the server is there and has sent nothing: a connection kept for later may have died meanwhile."""
        try:
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """All of them, one after the other, straight from where they lie."""
        left = [view for piece in pieces if len(view := memoryview(piece))]
        try:
            if self._tls:
                for view in left:
                    self._sock.sendall(view)
                return
            while left:
                left = after(left, self._sock.sendmsg(left[:_IOVECS]))
        except OSError as error:
            raise self._lost(error) from error

    def reply(self) -> Reply:
        """The next one, whole. For small ones: it is copied."""
        kind, rest = self._line()
        if kind == b"$":
            size = self._number(rest)
            return None if size < 0 else self._exactly(size + 2)[:-2]
        if kind == b"*":
            return [self.reply() for _ in range(self._number(rest))]
        if kind == b":":
            return self._number(rest)
        return rest if kind == b"+" else Refusal(rest.decode(errors="replace"))

    def value(self) -> int | Refusal | None:
        """Begins to read a value: its size. It is then taken by `take` and `into`, all of it, or the connection is of
        no use any more."""
        kind, rest = self._line()
        if kind == b"-":
            return Refusal(rest.decode(errors="replace"))
        if kind != b"$":
            raise self._foreign()
        size = self._number(rest)
        if size < 0:
            return None
        self._owed = size
        return size

    def take(self, size: int) -> bytes:
        """The value's next bytes."""
        data = self._exactly(size)
        self._took(size)
        return data

    def into(self, views: Sequence[memoryview]) -> None:
        """Fills them with the value's next bytes, straight from the socket."""
        left = [view for view in views if len(view)]
        while left and self._ahead:
            moved = min(len(left[0]), len(self._ahead))
            left[0][:moved], self._ahead = self._ahead[:moved], self._ahead[moved:]
            left = after(left, moved)
        try:
            while left:
                moved = self._sock.recv_into(left[0]) if self._tls else self._receive(left[:_IOVECS])
                if not moved:
                    raise self._lost()
                left = after(left, moved)
        except OSError as error:
            raise self._lost(error) from error
        self._took(sum(map(len, views)))

    def abort(self) -> None:
        """Ends whatever blocks on this connection; its thread then closes it."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._sock.close()

    def _log_in(self, address: RedisAddress) -> None:
        if address.password:
            words = [address.user.encode()] if address.user else []
            self._expect_ok(b"AUTH", *words, address.password.encode())
        if address.database:
            self._expect_ok(b"SELECT", b"%d" % address.database)
        self._expect_ok(b"PING")

    def _expect_ok(self, *words: bytes) -> None:
        self.send([command(*words)])
        answer = self.reply()
        if isinstance(answer, Refusal):
            raise StoreUnavailable(f"Redis at {self._name} refuses: {answer.message}")

    def _receive(self, views: list[memoryview]) -> int:
        return self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]

    def _took(self, size: int) -> None:
        if self._owed == size:
            self._exactly(2)
        self._owed -= size

    def _line(self) -> tuple[bytes, bytes]:
        while (end := self._ahead.find(b"\r\n")) < 0:
            if len(self._ahead) > _MOST_LINE_BYTES:
                raise self._foreign()
            self._read_more(_READ_BYTES)
        line, self._ahead = self._ahead[:end], self._ahead[end + 2 :]
        if line[:1] not in (b"+", b"-", b":", b"$", b"*"):
            raise self._foreign()
        return line[:1], line[1:]

    def _number(self, text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise self._foreign() from None

    def _exactly(self, size: int) -> bytes:
        while len(self._ahead) < size:
            self._read_more(size - len(self._ahead))
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    def _read_more(self, limit: int) -> None:
        try:
            data = self._sock.recv(limit)
        except OSError as error:
            raise self._lost(error) from error
        if not data:
            raise self._lost()
        self._ahead += data

    def _foreign(self) -> StoreUnavailable:
        return StoreUnavailable(f"what listens at {self._name} does not speak Redis' protocol as we do")

    def _lost(self, why: OSError | None = None) -> StoreUnavailable:
        return StoreUnavailable(f"connection to Redis at {self._name} lost{'' if why is None else f': {why}'}")


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def begun(*words: bytes, size: int) -> bytes:
    """A command whose last word, of `size` bytes, and a line's end are sent after it."""
    return b"*%d\r\n" % (len(words) + 1) + command(*words).partition(b"\r\n")[2] + b"$%d\r\n" % size


def _connected(address: RedisAddress, timeout_s: float, tls: ssl.SSLContext | None) -> socket.socket:
    if address.path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address.path)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((address.host, address.port), timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock if tls is None else tls.wrap_socket(sock, server_hostname=address.host)
    except BaseException:
        sock.close()
        raise
