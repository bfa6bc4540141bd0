"""The doors of a real gateway process: API keys from its settings, and a nats-server that wants a password."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from shared.bus.server import NatsServer
from tests.support_client import poll

KEY = "sk-alice-0123456789"


@contextmanager
def gateway(directory: Path, *flags: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    fixed = ("--model", "toy", "--cache-dir", str(directory), "--state-dir", str(directory / "state"), "--port", "0")
    with (directory / "log").open("w") as log:
        command = [sys.executable, "-m", "services.gateway", *fixed, *flags]
        process = subprocess.Popen(command, env=env | variables, stdout=log, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def serving_at(directory: Path) -> str:
    def line() -> str:
        return next((text for text in (directory / "log").read_text().splitlines() if " on http://" in text), "")

    found: str = poll(line, lambda: (directory / "log").read_text(), 60.0)
    return found.split(" on ")[1]


def test_keys_and_a_password_by_the_environment(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", user="baton", password="s3cret-of-nats")
    asyncio.run(server.start())
    try:
        url = f"nats://127.0.0.1:{server.port}"
        secrets = {
            "BATON_NATS_USER": "baton",
            "BATON_NATS_PASSWORD": "s3cret-of-nats",
            "BATON_API_KEYS": f"alice:{KEY}",
        }
        with gateway(tmp_path, "--nats-url", url, "--log-level", "debug", **secrets) as process:
            base = serving_at(tmp_path)
            assert httpx.get(f"{base}/v1/models", timeout=60.0).status_code == 401
            key = {"Authorization": f"Bearer {KEY}"}
            assert httpx.get(f"{base}/v1/models", headers=key, timeout=60.0).json()["data"][0]["id"] == "toy"
            body = {"model": "toy", "prompt": [1, 2, 3]}
            assert httpx.post(f"{base}/v1/completions", json=body, timeout=60.0).status_code == 401
            assert (
                httpx.post(f"{base}/v1/completions", json=body, headers=key, timeout=60.0).json()["error"]["code"]
                == "no_worker"
            )
            assert httpx.get(f"{base}/health", timeout=60.0).json()["reason"] == "no decode worker is ready"
            assert "baton_ready" in httpx.get(f"{base}/metrics", timeout=60.0).text
            assert httpx.get(f"{base}/cluster", timeout=60.0).status_code == 401
            poll(
                lambda: httpx.get(f"{base}/cluster", headers=key, timeout=60.0).json()["workers"],
                "it hears nobody, not itself",
                60.0,
            )
            shown = httpx.get(f"{base}/cluster", headers=key, timeout=60.0).text
            process.terminate()
            assert process.wait(60) == 0
        for text in (shown, (tmp_path / "log").read_text()):
            assert KEY not in text
            assert "s3cret" not in text
    finally:
        asyncio.run(server.stop())


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"BATON_API_KEYS": "sk-s3cret-without-tenant"}, "gateway: api_keys: entry 1: write tenant:KEY"),
        ({"BATON_API_KEYS_FILE": "/nowhere/keys"}, "gateway: api_keys_file: /nowhere/keys: No such file"),
        ({"BATON_NATS_USER": "me"}, "gateway: nats_user and nats_password go together"),
        ({"BATON_HEARTBEAT_S": "1.5"}, "worker_timeout_s (2) must be more than twice heartbeat_s (1.5)"),
    ],
)
def test_a_wrong_door_is_named_at_the_start(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    with gateway(tmp_path, **variables) as process:
        assert process.wait(60) == 78
    text = (tmp_path / "log").read_text()
    assert said in text
    assert "s3cret" not in text
    assert "Traceback" not in text
