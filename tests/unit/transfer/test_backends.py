"""Which link backends a setting `transfer` gives, and what is said where it cannot."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.runtime import backend_names
from shared.runtime.backend_names import AUTO, OURS, chosen_names
from shared.runtime.settings import ConfigError, SidecarSettings, load_settings
from shared.transfer import backends
from shared.transfer.backend import Faults, Timing
from shared.transfer.backends import Site, start_backends
from shared.transfer.door import Door
from shared.transfer.pool import Pool, create_pool
from tests.contract.transfer_links import LAYOUT
from tests.support_plugin import ECHO, install


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages can be installed."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    fd = create_pool(LAYOUT)
    pool, door = Pool.map(fd, LAYOUT, writable=True), Door(LAYOUT, lambda _key, _backend: None)
    yield Site(pool, fd, door, "boot", tmp_path, "127.0.0.1", "127.0.0.1", {}, Timing(), Faults())
    os.close(fd)


def sockets(site: Site) -> list[Path]:
    return list(site.directory.glob("*.sock"))


def test_ours_have_factories() -> None:
    assert set(backends._OURS) == set(OURS) >= set(AUTO)


@pytest.mark.parametrize(
    ("transfer", "names"),
    [("auto", ("shm", "tcp")), ("tcp", ("tcp",)), ("tcp, shm", ("tcp", "shm")), (" auto ", ("shm", "tcp"))],
)
def test_a_setting_names_backends_in_order(transfer: str, names: tuple[str, ...]) -> None:
    assert chosen_names(transfer) == names


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        ("", "give names"),
        ("shm,", "give names"),
        ("shm,shm", "each once"),
        ("shn", "only auto, shm, tcp, nixl; did you mean 'shm'?"),
        ("shm,auto", "no link backend 'auto'"),
    ],
)
def test_what_is_no_backend_is_said(transfer: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen_names(transfer)
    assert said in str(caught.value)


def test_a_process_without_nixl_refuses_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_names, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"transfer: nixl is not installed here: pip install 'baton-serving\[nixl\]'"):
        load_settings(SidecarSettings, {"transfer": "shm,nixl"})
    assert load_settings(SidecarSettings, {"transfer": "shm,tcp"}).transfer == "shm,tcp"


def test_what_runs_is_told_to_peers(site: Site) -> None:
    running, address = start_backends(site, "tcp,shm")
    assert [backend.name for backend in running] == list(address.backends) == ["tcp", "shm"]
    assert address.port == running[0].port  # type: ignore[attr-defined]
    assert address.socket == "boot.sock"
    assert (address.endpoints, address.asked) == ((), "tcp,shm")
    for backend in running:
        backend.close()


def test_a_backend_of_another_package_is_found(site: Site, plugins: Path) -> None:
    install(plugins, "plug_found", "echo")
    running, address = start_backends(site, "shm,echo")
    assert address.backends == ("shm", "echo")
    assert int(address.endpoint("echo")) > 0
    assert running[0].reaches(address)
    assert running[1].reaches(address)
    for backend in running:
        backend.close()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nowhere_at_all", "'echo' of plug_bad (baton.transfer) cannot be loaded: ModuleNotFoundError"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("finish = None", "cannot be loaded: AttributeError"),
        ("start = 7", "plug_bad:start is no factory"),
        ("def start(site): return site", "does not say that it is one of that name"),
        (ECHO.replace('name = "echo"', 'name = "ohce"'), "does not say that it is one of that name"),
    ],
    ids=["import", "error", "missing", "no factory", "no offer", "other name"],
)
def test_a_package_that_is_no_good_is_named(site: Site, plugins: Path, source: str, said: str) -> None:
    install(plugins, "plug_bad", "echo", source)
    with pytest.raises(ConfigError) as caught:
        start_backends(site, "shm,echo")
    assert said in str(caught.value)
    assert sockets(site) == []  # the one before it runs no more


def test_a_name_of_ours_is_ours(plugins: Path) -> None:
    install(plugins, "plug_clash", "tcp")
    with pytest.raises(ConfigError, match="plug_clash brings a link backend 'tcp', and that name is ours"):
        chosen_names("auto")


def test_two_packages_cannot_bring_one_name(plugins: Path) -> None:
    install(plugins, "plug_one", "echo")
    install(plugins, "plug_two", "echo")
    assert chosen_names("auto") == AUTO
    with pytest.raises(ConfigError, match="plug_one and plug_two both bring a link backend 'echo'"):
        chosen_names("echo")
