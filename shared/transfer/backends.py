"""Which link backends a sidecar runs: ours, and those of installed packages (docs/backends.md).

A backend is made by a *factory*: a callable that takes the `Site` and returns an `Offer`. A package brings one under
the entry point group `baton.transfer`; its name there is what the setting `transfer` calls it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from shared.protocol.reports import LinkAddress
from shared.runtime.backend_names import GROUP, chosen_names, entry_point, owner
from shared.runtime.config_file import ConfigError
from shared.transfer.backend import Backend, Faults, Timing
from shared.transfer.door import Door
from shared.transfer.formats.agree import EXACT_FORMATS
from shared.transfer.pool import Pool
from shared.transfer.shm import ShmBackend
from shared.transfer.tcp import TcpBackend


@dataclass(frozen=True, slots=True)
class Site:
    """What a backend is made with.

    pool: the worker's, mapped here; pool_fd stays the caller's. boot_id: of this sidecar. directory: for sockets of one
    host. host: what peers of other hosts are told. listen_host: where to listen. ports: by backend, of those that have
    a setting for it; 0 is a free one. formats: wire formats that it reads and writes. tcp_streams: connections to a
    peer that a large transfer may take side by side.
    """

    pool: Pool
    pool_fd: int
    door: Door
    boot_id: str
    directory: Path
    host: str
    listen_host: str
    ports: Mapping[str, int]
    timing: Timing
    faults: Faults
    formats: tuple[str, ...] = EXACT_FORMATS
    tcp_streams: int = 1


@dataclass(frozen=True, slots=True)
class Offer:
    """A backend that runs, and what peers need to reach it. endpoint: anything it likes; peers find it as
    `LinkAddress.endpoint(name)`. port and socket belong to `tcp` and `shm`."""

    backend: Backend
    port: int = 0
    socket: str = ""
    endpoint: str = ""


Factory = Callable[[Site], Offer]


def start_backends(site: Site, transfer: str) -> tuple[tuple[Backend, ...], LinkAddress]:
    """Starts what the setting `transfer` asks for, in order of preference. Raises ConfigError, with none of them
    running, if one cannot be had."""
    offers: list[Offer] = []
    with ExitStack() as undo:
        for name in chosen_names(transfer):
            offer = _start(name, site)
            undo.callback(offer.backend.close)
            offers.append(offer)
        undo.pop_all()
    address = LinkAddress(
        boot_id=site.boot_id,
        host=site.host,
        port=next((offer.port for offer in offers if offer.port), 0),
        socket=next((offer.socket for offer in offers if offer.socket), ""),
        backends=tuple(offer.backend.name for offer in offers),
        formats=site.formats,
        endpoints=tuple((offer.backend.name, offer.endpoint) for offer in offers if offer.endpoint),
        asked=transfer,
    )
    return tuple(offer.backend for offer in offers), address


def _start(name: str, site: Site) -> Offer:
    factory = _OURS[name] if name in _OURS else _installed(name)
    offer: object = factory(site)
    if not isinstance(offer, Offer) or offer.backend.name != name:
        raise ConfigError(f"what runs as link backend {name!r} does not say that it is one of that name")
    return offer


def _installed(name: str) -> Factory:
    found = entry_point(name)
    try:
        factory: Factory = found.load()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"link backend {name!r} of {owner(found)} ({GROUP}) cannot be loaded: {what}") from error
    if not callable(factory):
        raise ConfigError(f"link backend {name!r} of {owner(found)} ({GROUP}): {found.value} is no factory")
    return factory


def _shm(site: Site) -> Offer:
    socket = f"{site.boot_id}.sock"
    shm = ShmBackend(site.pool, site.pool_fd, site.door, site.boot_id, site.directory, socket, site.timing, site.faults)
    return Offer(shm, socket=socket)


def _tcp(site: Site) -> Offer:
    port = site.ports.get("tcp", 0)
    tcp = TcpBackend(
        site.pool,
        site.door,
        site.boot_id,
        site.listen_host,
        port,
        site.timing,
        site.faults,
        site.formats,
        site.tcp_streams,
    )
    return Offer(tcp, port=tcp.port)


def _nixl(site: Site) -> Offer:
    # Here, because it is the only one that needs a package of its own.
    from shared.transfer.nixl import NixlBackend

    port = site.ports.get("nixl", 0)
    nixl = NixlBackend(site.pool, site.door, site.boot_id, site.listen_host, port, site.timing, site.faults)
    return Offer(nixl, endpoint=str(nixl.port))


_OURS: Mapping[str, Factory] = {"shm": _shm, "tcp": _tcp, "nixl": _nixl}
