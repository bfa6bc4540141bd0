"""Who gets into NATS, and how: users, tokens, and TLS with an authority of our own. Real servers, real certificates."""

from pathlib import Path

import pytest

from services.gateway.streams.journal import PARTS, STATES, Journal
from shared.bus import nats
from shared.bus.base import BusError
from shared.bus.kv import Bucket
from shared.bus.server import NatsServer
from shared.protocol import subjects
from shared.runtime.clock import LoopClock
from shared.runtime.settings import ConfigError, DecodeSettings, load_settings
from tests.support_bus import refusal
from tests.support_certificates import Certificates, make_certificates, needs_openssl


class ConfiguredServer(NatsServer):
    """A server with lines of its own."""

    lines: tuple[str, ...] = ()

    def _config(self) -> str:
        return "\n".join([super()._config(), *self.lines, ""])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def attempt(server: NatsServer, url: str = "", **given: object) -> None:
    """Lets a process with these settings in, or raises BusError."""
    settings = load_settings(DecodeSettings, {"nats_url": url or server.url, **given})
    options = nats.NatsOptions(connect_timeout_s=1.0, access=nats.options_from(settings).access)
    bus = await nats.connect(settings.nats_url, "test", options)
    try:
        await bus.subscribe("x", lambda message: _answer(message.data))
        assert await bus.request("x", b"in", 30) == b"in"
    finally:
        await bus.close()


async def refused(said: str, server: NatsServer, url: str = "", **given: object) -> str:
    """Why it lets nobody in with these settings."""
    return await refusal(said, lambda: attempt(server, url, **given))


async def _answer(data: bytes) -> bytes:
    return data


async def test_user_and_password(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, user="baton", password="s3cret/@:x") as server:
        bare = f"nats://127.0.0.1:{server.port}"
        await attempt(server, bare, nats_user="baton", nats_password="s3cret/@:x")
        for given in ({}, {"nats_user": "baton", "nats_password": "wrong"}, {"nats_token": "s3cret/@:x"}):
            assert "s3cret" not in await refused("Authorization", server, bare, **given)


async def test_a_token(tmp_path: Path) -> None:
    server = ConfiguredServer(tmp_path)
    server.lines = ('authorization { token: "a-token" }',)
    async with server:
        await attempt(server, nats_token="a-token")
        await refused("Authorization", server, nats_token="another")


async def test_the_permissions_of_the_operations_page_are_enough_and_no_more(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    permissions = next(line for line in page.splitlines() if line.startswith("permissions {"))
    server = ConfiguredServer(tmp_path)
    server.lines = (f'authorization {{ users: [{{ user: "baton", password: "s3cret", {permissions} }}] }}',)
    async with server:
        bus = await nats.connect(f"nats://baton:s3cret@127.0.0.1:{server.port}", "test")
        for role, verb in (("gateway", subjects.TOKENS), ("decode", subjects.RESERVE), ("kvstore", subjects.HEARTBEAT)):
            where = subjects.subject(role, "peer-1", verb)
            await bus.subscribe(where, lambda message: _answer(message.data))
            assert await bus.request(where, b"in", 30) == b"in"
        heard: list[bytes] = []
        await bus.subscribe(subjects.all_heartbeats(), lambda message: _note(heard, message.data))
        await bus.publish(subjects.subject("decode", "peer-2", subjects.HEARTBEAT), b"report")
        await bus.publish("somebody.else", b"not ours")
        await bus.request(subjects.subject("gateway", "peer-1", subjects.TOKENS), b"after it", 30)
        assert heard == [b"report"]
        assert bus.stats.errors == 1, "the server refused the one that is not ours"
        journal = Journal(bus, LoopClock(), 30.0, 60.0)
        assert await journal.read("0" * 32) is None
        for name in (STATES, PARTS):
            kept = await bus.bucket(Bucket(name, ttl_s=60.0))
            await kept.update("a", b"2", await kept.create("a", b"1"))
            await kept.delete("a")
        await bus.close()


async def _note(heard: list[bytes], data: bytes) -> None:
    heard.append(data)


@needs_openssl
async def test_tls_with_our_own_authority(tmp_path: Path, certificates: Certificates) -> None:
    server = ConfiguredServer(tmp_path, user="baton", password="s3cret")
    server.lines = (certificates.tls(),)
    async with server:
        await attempt(server, nats_tls_ca=certificates.ca)
        await refused("certificate", server, nats_tls_ca=certificates.other_ca)
        await refused("certificate", server)  # nats-server asks for TLS, and nobody here knows it
        by_name = f"nats://baton:s3cret@localhost:{server.port}"
        await refused("certificate|localhost", server, by_name, nats_tls_ca=certificates.ca)  # known as 127.0.0.1 alone


@needs_openssl
async def test_a_server_that_wants_to_know_us(tmp_path: Path, certificates: Certificates) -> None:
    server = ConfiguredServer(tmp_path)
    server.lines = (certificates.tls(verify=True),)
    async with server:
        pair = {"nats_tls_cert": certificates.client, "nats_tls_key": certificates.client.with_suffix(".key")}
        await attempt(server, nats_tls_ca=certificates.ca, **pair)
        with pytest.raises(BusError):
            await attempt(server, nats_tls_ca=certificates.ca)


@needs_openssl
async def test_a_server_without_tls_gets_no_word_of_who_insists_on_it(
    tmp_path: Path, certificates: Certificates
) -> None:
    """Somebody in between who says that there is no TLS must not get the password."""
    server = ConfiguredServer(tmp_path, user="baton", password="s3cret")
    server.lines = ("trace: true",)
    async with server:
        await refused("offers no TLS", server, nats_tls_ca=certificates.ca)
        await refused("offers no TLS", server, f"tls://baton:s3cret@127.0.0.1:{server.port}")
        assert "CONNECT" not in server.log_path.read_text()
        await attempt(server)
        assert "CONNECT" in server.log_path.read_text()


@needs_openssl
def test_files_that_do_not_fit_are_a_mistake_in_the_settings(tmp_path: Path, certificates: Certificates) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(ConfigError, match=r"decode: nats_tls_ca: .*holds no certificate"):
        nats.options_from(load_settings(DecodeSettings, {"nats_tls_ca": empty}))
    pair = {"nats_tls_cert": certificates.client, "nats_tls_key": certificates.server.with_suffix(".key")}
    with pytest.raises(ConfigError, match=r"decode: nats_tls_cert: .*do not fit"):
        nats.options_from(load_settings(DecodeSettings, pair))
