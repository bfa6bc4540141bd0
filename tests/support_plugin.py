"""Installs a package that brings a link backend, as far as Python can tell: a module and its entry point."""

import importlib
import sys
from pathlib import Path

ECHO = """
from shared.protocol.reports import LinkAddress
from shared.transfer.backend import Channel
from shared.transfer.backends import Offer, Site
from shared.transfer.tcp import TcpBackend


class Echo(TcpBackend):
    name = "echo"

    def reaches(self, peer: LinkAddress) -> bool:
        return bool(peer.endpoint("echo"))

    def connect(self, peer: LinkAddress) -> Channel:
        return super().connect(peer.model_copy(update={"port": int(peer.endpoint("echo"))}))


def start(site: Site) -> Offer:
    echo = Echo(site.pool, site.door, site.boot_id, site.listen_host, 0, site.timing, site.faults)
    return Offer(echo, endpoint=str(echo.port))
"""
"""Our TCP under another name, found by an endpoint of its own."""


def install(directory: Path, package: str, name: str, source: str = ECHO, attribute: str = "start") -> None:
    """Into a directory that is, or will be, on the path of modules."""
    directory.mkdir(exist_ok=True)
    (directory / f"{package}.py").write_text(source)
    info = directory / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[baton.transfer]\n{name} = {package}:{attribute}\n")
    importlib.invalidate_caches()
    sys.modules.pop(package, None)
