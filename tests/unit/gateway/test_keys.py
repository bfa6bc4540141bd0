"""API keys at the door: who may ask, as which tenant, and what everybody else gets."""

import asyncio
import hashlib
import io
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from services.gateway.keys import InvalidKeys, Keyring, parse_keys
from shared.runtime.settings import ConfigError, GatewaySettings, load_settings

ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
KEYS = f"alice:{ALICE},bob:sha256:{hashlib.sha256(BOB.encode()).hexdigest()}"


@pytest.fixture
async def guarded(start: Any) -> Any:
    return await start(keys=Keyring(KEYS, None))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_key_lets_in_and_names_the_tenant(guarded: Any) -> None:
    for key, tenant in ((ALICE, "alice"), (BOB, "bob")):
        client = guarded.client.with_options(api_key=key)
        answer = await client.completions.create(model="toy", prompt="Say")
        assert answer.choices[0].text == "Hello, world"
        assert guarded.generation.request.tenant == tenant
        assert [model.id async for model in client.models.list()] == ["toy", "org/toy"]


async def test_without_keys_everybody_is_the_default_tenant(gateway: Any) -> None:
    await gateway.client.completions.create(model="toy", prompt="Say")
    assert gateway.generation.request.tenant == "default"


async def test_the_official_client_sees_an_authentication_error(guarded: Any) -> None:
    client = guarded.client.with_options(api_key="sk-somebody-else")
    with pytest.raises(openai.AuthenticationError) as failure:
        await client.completions.create(model="toy", prompt="Say")
    assert (failure.value.code, failure.value.type) == ("invalid_api_key", "authentication_error")
    assert guarded.generator.generations == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/toy"),
        ("GET", "/cluster"),
        ("GET", "/version"),
        ("GET", "/nowhere"),
        ("DELETE", "/v1/completions"),
        ("GET", "//health"),
        ("GET", "/health/"),
        ("GET", "/metrics/../cluster"),
    ],
)
async def test_everything_but_the_probes_wants_a_key(guarded: Any, method: str, path: str) -> None:
    from yarl import URL

    url = URL(guarded.url + path, encoded=True)
    async with guarded.http.request(method, url) as response:
        assert response.status == 401
        error = (await response.json())["error"]
        assert error["code"] == "invalid_api_key"
        assert error["param"] is None
        assert response.headers["WWW-Authenticate"].startswith('Bearer realm="baton"')
        assert response.headers["x-baton-request-id"].startswith("req-")


async def test_the_probes_are_open(guarded: Any) -> None:
    for path in ("/health", "/metrics"):
        async with guarded.http.get(guarded.url + path) as response:
            assert response.status == 200
    async with guarded.http.get(guarded.url + "/cluster", headers=bearer(BOB)) as response:
        assert response.status == 200
    assert 'baton_http_errors_total{code="invalid_api_key"}' not in await guarded.metrics()
    async with guarded.http.get(guarded.url + "/cluster", headers=bearer(BOB[:-1])) as response:
        assert response.status == 401
    assert 'baton_http_errors_total{code="invalid_api_key"} 1.0' in await guarded.metrics()


HEADERS: list[bytes] = [
    b"",
    b"Authorization:",
    b"Authorization: Bearer",
    b"Authorization: Bearer    ",
    b"Authorization: Bearer " + ALICE[:-1].encode(),
    b"Authorization: Bearer " + ALICE.encode() + b"x",
    b"Authorization: Bearer " + ALICE.upper().encode(),
    b"Authorization: Bearer " + ALICE.encode() + b" " + ALICE.encode(),
    b"Authorization: Basic " + ALICE.encode(),
    b"Authorization: " + ALICE.encode(),
    b"Authorization: Bearer\t" + ALICE.encode(),
    b"Authorization: Bearer \xff\xfe\x80",
    b"Authorization: Bearer \xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9",
    b"Authorization: Bearer sha256:" + hashlib.sha256(ALICE.encode()).hexdigest().encode(),
    b"Authorization: Bearer " + hashlib.sha256(BOB.encode()).hexdigest().encode(),
    b"Authorization: Bearer " + b"k" * 7000,
    b"Authorization: Bearer " + ALICE.encode() + b"\r\nAuthorization: Bearer " + BOB.encode(),
    b"Authorization: " + b", ".join([b"Bearer " + ALICE.encode()] * 2),
]


async def raw(gateway: Any, header: bytes) -> bytes:
    host, _, port = gateway.url.removeprefix("http://").partition(":")

    def ask() -> bytes:
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            line = header + b"\r\n" if header else b""
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + line + b"\r\n")
            answer = b""
            while chunk := sock.recv(4096):
                answer += chunk
            return answer

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
async def test_malformed_headers_are_refused_and_break_nothing(guarded: Any, header: bytes) -> None:
    answer = await raw(guarded, header)
    assert answer.split(b" ", 2)[1] == b"401", answer
    assert b"invalid_api_key" in answer
    assert ALICE.encode() not in answer
    assert b" 200 " in (await raw(guarded, b"authorization: bEARER  " + ALICE.encode()))[:20]


async def test_a_refused_upload_is_not_read_first(guarded: Any) -> None:
    """8 MiB are not to be had by whoever asks."""
    headers = {"Content-Type": "application/json"} | bearer("sk-nobody-at-all")
    async with guarded.http.post(
        f"{guarded.url}/v1/completions", data=io.BytesIO(b"[" * (4 << 20)), headers=headers
    ) as response:
        assert response.status == 401


async def test_the_terminal_commands_take_a_key(guarded: Any) -> None:
    async def run(*command: str, **env: str) -> tuple[int | None, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli", *command, "--url", guarded.url),
            env={key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"} | env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, said = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, out.decode(), said.decode()

    status, out, said = await run("chat", "--max-tokens", "32", "--say", "Hello?", "--api-key", ALICE)
    assert (status, out.strip()) == (0, "Hello, world"), said
    status, out, said = await run("chat", "--max-tokens", "32", "--say", "Hello?", OPENAI_API_KEY=BOB)
    assert (status, out.strip()) == (0, "Hello, world"), said
    assert guarded.generation.request.tenant == "bob"
    status, _, said = await run("chat", "--max-tokens", "32", "--say", "Hello?")
    assert status == 1
    assert "--api-key or OPENAI_API_KEY" in said
    assert "Traceback" not in said


def test_keys_are_nowhere_in_the_clear(caplog: pytest.LogCaptureFixture) -> None:
    keys = Keyring(KEYS, None)
    assert ALICE not in repr(vars(keys))
    settings = load_settings(GatewaySettings, {"api_keys": KEYS})
    assert settings.public()["api_keys"] == "***"
    assert ALICE not in repr(settings)
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3cret-without-tenant", "entry 1: write tenant:KEY"),
        ("alice:sk-alice-01,Bob:sk-s3cret-01", "entry 2: write tenant:KEY"),
        ("alice:short", "8 to 256 printable"),
        ("alice:with space inside", "8 to 256 printable"),
        ("alice:sha256:s3cret", "64 hexadecimal digits"),
        ("alice:sk-s3cret-01,bob:sk-s3cret-01", "the same key belongs to 'alice' already"),
        (":sk-s3cret-01", "write tenant:KEY"),
    ],
)
def test_a_wrong_entry_is_named_but_not_quoted(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="gateway: api_keys: ") as caught:
        Keyring(text, None)
    assert said in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_no_keys_are_no_door() -> None:
    assert Keyring.from_settings(load_settings(GatewaySettings)) is None


@pytest.mark.parametrize("content", ["", "# nobody yet\n\n", "alice\n", "alice:" + "x" * 300, "\udcff"])
def test_a_file_without_a_key_does_not_open_the_door(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match="gateway: api_keys_file: "):
        Keyring.from_settings(load_settings(GatewaySettings, {"api_keys_file": str(file)}))
    with pytest.raises(ConfigError, match=r"gateway: api_keys_file: .*No such file"):
        Keyring("", tmp_path / "none")


def test_a_changed_file_is_taken_up_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# people\nalice:{ALICE}\n\n")
    file.chmod(0o600)
    keys = Keyring(f"carol:{'c' * 20}", file)
    assert keys.tenant_of(ALICE) == "alice"
    assert keys.tenant_of("c" * 20) == "carol"
    assert keys.tenant_of(BOB) is None
    file.write_text(f"bob:{BOB}\n")
    keys.refresh()
    assert (keys.tenant_of(ALICE), keys.tenant_of(BOB), keys.tenant_of("c" * 20)) == (None, "bob", "carol")
    for broken in ("", "nonsense\n", f"bob:{'c' * 20}\n"):
        file.write_text(broken)
        with caplog.at_level(logging.ERROR):
            caplog.clear()
            keys.refresh()
        assert "the keys stay as they were" in caplog.text
        assert keys.tenant_of(BOB) == "bob"
    file.unlink()
    keys.refresh()
    assert keys.tenant_of(BOB) == "bob"


def test_a_file_that_all_can_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{ALICE}\n")
    file.chmod(0o644)
    Keyring("", file)
    assert "can be read by every user" in caplog.text
    assert ALICE not in caplog.text
    assert os.stat(file).st_mode & 0o004


def test_entries_may_have_space_around_and_a_key_may_hold_a_colon() -> None:
    assert list(parse_keys(" a:key:with:colons ,, b:another-key", ",").values()) == ["a", "b"]
    with pytest.raises(InvalidKeys):
        parse_keys("a b:another-key", ",")
