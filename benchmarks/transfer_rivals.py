"""Links of others for `bench-transfer`, each two processes of their own that move the same pages."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

from benchmarks.rivals import SCRIPTS, Rival, environment
from benchmarks.transfer_ends import Work
from shared.runtime.settings import GatewaySettings, load_settings


def nixl(work: Work, transports: str) -> Rival:
    """transports: what UCX may use; empty: what it likes."""
    home = _home()
    python = environment(home / "nixl", ["--no-deps", "nixl-cu12==1.5.1", "numpy"])
    env = {"UCX_TLS": transports} if transports else {}
    name = f"nixl-{transports or 'any'}"
    return Rival(name, [str(python), str(SCRIPTS / "nixl_pages.py"), *_sizes(work)], home / f"{name}.log", env)


def mooncake(work: Work) -> Rival:
    home = _home()
    python = environment(home / "mooncake", ["--no-deps", "mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"])
    return Rival("mooncake", [str(python), str(SCRIPTS / "mooncake_pages.py"), *_sizes(work)], home / "mooncake.log")


def _home() -> Path:
    return load_settings(GatewaySettings).cache_dir / "peers"


def _sizes(work: Work) -> list[str]:
    return [str(size) for size in astuple(work)]


@dataclass(frozen=True, slots=True)
class Versus:
    """A row: our way beside a rival's, which is to be no faster."""

    name: str
    transfer: str
    make: Callable[[Work], Rival]


VERSUS = (
    Versus("shm-vs-nixl", "shm", lambda work: nixl(work, "")),
    Versus("tcp-vs-nixl", "tcp", lambda work: nixl(work, "tcp")),
    Versus("tcp-vs-mooncake", "tcp", mooncake),
)
