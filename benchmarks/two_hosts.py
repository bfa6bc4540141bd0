"""Two network namespaces joined by a link of a given rate: two hosts, as far as sockets can tell.

Needs root, `ip` and `tc`. Each end's egress goes through a token bucket with a queue of 50 ms.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

_NAMES = ("a", "b")
_NEW_NETWORK = 0x40000000
_NAMESPACES = Path("/var/run/netns")


class NoLink(Exception):
    """No such link can be made here; says why in one line."""


class TwoHosts:
    """`with TwoHosts("200mbit") as hosts:` they are there inside, and gone afterwards."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, rate: str) -> None:
        self._rate = rate
        self._spaces = tuple(f"baton-{os.getpid()}-{name}" for name in _NAMES)

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise NoLink("network namespaces need root")
        if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
            raise NoLink(f"{' and '.join(missing)} not found (Debian: iproute2)")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self._remove()
            raise NoLink(f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}") from None
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @contextmanager
    def inside(self, index: int) -> Iterator[None]:
        """What this thread starts or opens in the block is on that host."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(_NAMESPACES / self._spaces[index])
            try:
                yield
            finally:
                _set(here)
        finally:
            os.close(here)

    def _make(self) -> None:
        for space in self._spaces:
            _run("ip", "netns", "add", space)
        a, b = self._spaces
        _run("ip", "link", "add", "va", "netns", a, "type", "veth", "peer", "name", "vb", "netns", b)
        for space, name, address in zip(self._spaces, _NAMES, self.addresses, strict=True):
            device = f"v{name}"
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "set", device, "up")
            shape = ("tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *shape)

    def _remove(self) -> None:
        for space in self._spaces:
            subprocess.run(("ip", "netns", "del", space), capture_output=True, check=False)


def _enter(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        _set(fd)
    finally:
        os.close(fd)


def _set(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _NEW_NETWORK):
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
