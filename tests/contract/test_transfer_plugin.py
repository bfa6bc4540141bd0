"""A link backend of another package moves bytes between real sidecars; one that does not load ends them."""

import os
from pathlib import Path

import pytest

from shared.runtime.settings import ConfigError
from shared.transfer.pool import create_pool
from shared.transfer.sidecar_link import SidecarLink
from shared.transfer.sidecar_options import SidecarOptions
from tests.contract.transfer_links import LAYOUT, Pair, expected_pool, make_pair, new_ticket
from tests.contract.transfer_trio import PIECES, TABLE
from tests.support_plugin import install


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On the path of this process and of those it starts."""
    directory = tmp_path / "site"
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=":")
    return directory


async def test_it_moves_state_like_any_other(site: Path, tmp_path: Path) -> None:
    install(site, "plug_moves", "echo")
    pair: Pair = await make_pair("echo", tmp_path)
    pair.sender.scramble()
    pair.receiver.poison()
    key, secret = new_ticket()
    await pair.receiver.link.open(key, secret, TABLE, lambda _key: None)
    await pair.sender.link.send(key, secret, pair.receiver.link.address, PIECES)
    assert (pair.receiver.pool == expected_pool(pair, TABLE, PIECES)).all()
    assert await pair.receiver.link.received(key) == await pair.sender.link.sent(key)
    assert pair.sender.link.actual_backend(key) == pair.receiver.link.actual_backend(key) == "echo"
    assert pair.sender.link.address.asked == "echo"
    await pair.close()


async def test_a_sidecar_that_cannot_have_it_ends_for_good(site: Path, tmp_path: Path) -> None:
    """Its worker is told that the settings are wrong: starting it again would not help."""
    install(site, "plug_broken", "echo", "import nowhere_at_all")
    fd = create_pool(LAYOUT)
    with pytest.raises(ConfigError, match="cannot start with its settings"):
        await SidecarLink.start(SidecarOptions("s", tmp_path, transfer="echo"), fd, LAYOUT)
    os.close(fd)
