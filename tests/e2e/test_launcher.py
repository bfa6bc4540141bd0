"""The launcher with real processes and a real nats-server; only the roles are stand-ins, which start at once."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest

from shared.bus import nats
from tests.support_bus import refusal
from tests.support_client import is_alive, poll

REPO = Path(__file__).parents[2]
CLUSTER = Path(__file__).with_name("standin_cluster.py")
DEADLINE_S = 60.0


class Cluster:
    def __init__(self, directory: Path, *flags: str, **env: str) -> None:
        self.output = directory / f"output-{len(list(directory.iterdir()))}"
        self.port = free_port()
        variables = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(CLUSTER), "up", "--port", str(self.port), *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=variables | {"PYTHONPATH": str(REPO), **env},
            )
        self.family: list[psutil.Process] = []

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        def seen() -> bool:
            return self.text().count(text) >= times or self.process.poll() is not None

        poll(seen, f"no {text!r} in:\n{self.text()}", DEADLINE_S)
        assert self.text().count(text) >= times, f"ended without {text!r}:\n{self.text()}"

    def wait_ready(self) -> None:
        self.wait_for("Ready  ")
        self.note_family()

    def note_family(self) -> None:
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def find(self, *words: str) -> psutil.Process | None:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if list(words) == process.cmdline()[-len(words) :]:
                    return process
            except psutil.Error:
                continue
        return None

    def wait_all_gone(self) -> None:
        poll(lambda: not any(is_alive(process) for process in self.family), "processes are left", DEADLINE_S)

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Cluster] = []

    def begin(*flags: str, **env: str) -> Cluster:
        running.append(Cluster(tmp_path, *flags, **env))
        return running[-1]

    yield begin
    for cluster in running:
        if cluster.process.poll() is None:
            cluster.note_family()
            cluster.process.kill()
            cluster.process.wait()
        for process in cluster.family:  # psutil knows a process from a later one with its pid
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_starts_serves_and_ends_in_order(start: Start) -> None:
    cluster = start("--decode", "2")
    cluster.wait_ready()
    assert httpx.get(f"http://127.0.0.1:{cluster.port}/health", timeout=60.0).status_code == 200
    cluster.wait_for(f"curl http://127.0.0.1:{cluster.port}/v1/chat/completions")
    roles = [process.cmdline()[-1] for process in cluster.family if "standin_worker.py" in " ".join(process.cmdline())]
    assert sorted(roles) == ["decode", "decode", "gateway", "kvstore", "prefill"]
    assert len(cluster.family) == 5 + 3 + 1, "with the workers' own children and nats-server"
    assert cluster.end() == 0
    cluster.wait_all_gone()
    lines = [line for line in cluster.text().splitlines() if "stopped in order" in line]
    names = [line.split()[0] for line in lines]
    assert names[0] == "gateway"
    assert names[-1] == "kvstore"
    assert sorted(names[1:-1]) == ["decode-0", "decode-1", "prefill-0"]


def test_several_gateways_serve_side_by_side(start: Start) -> None:
    cluster = start("--gateway", "2")
    cluster.wait_ready()
    assert "2 gateways" in cluster.text()
    assert httpx.get(f"http://127.0.0.1:{cluster.port}/health", timeout=60.0).status_code == 200
    roles = [process.cmdline()[-1] for process in cluster.family if "standin_worker.py" in " ".join(process.cmdline())]
    assert sorted(roles) == ["decode", "gateway", "gateway", "kvstore", "prefill"]
    assert cluster.end() == 0
    cluster.wait_all_gone()


def test_nothing_survives_a_killed_launcher(start: Start) -> None:
    cluster = start()
    cluster.wait_ready()
    assert len(cluster.family) == 4 + 2 + 1
    sleepers = [process for process in cluster.family if process.name() == "sleep"]
    assert len(sleepers) == 2
    cluster.process.kill()
    # A sidecar ends with its worker by itself; `sleep`, which stands in for it, does not.
    rest = [process for process in cluster.family if process not in sleepers]
    poll(lambda: not any(is_alive(process) for process in rest), "processes are left", DEADLINE_S)


def test_what_dies_is_started_again_as_a_new_peer(start: Start) -> None:
    cluster = start()
    cluster.wait_ready()
    first = cluster.find("decode")
    assert first is not None
    child = first.children()[0]
    first.kill()
    cluster.wait_for("decode-0  │ died: killed by SIGKILL")
    cluster.wait_for("decode-0  │ ready", times=2)
    second = cluster.find("decode")
    assert second is not None
    assert second.pid != first.pid
    poll(lambda: not is_alive(child), "what the dead worker had started is still there", DEADLINE_S)
    boots = {line.split("boot=")[1] for line in cluster.text().splitlines() if "decode-0" in line and "boot=" in line}
    assert len(boots) == 2
    cluster.note_family()
    assert cluster.end(signal.SIGTERM) == 0
    cluster.wait_all_gone()


def test_a_dead_nats_server_comes_back_on_its_port(start: Start) -> None:
    cluster = start()
    cluster.wait_ready()
    server = next(process for process in cluster.family if process.name() == "nats-server")
    server.kill()
    cluster.wait_for("starting it again")

    def served() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{cluster.port}/health", timeout=10.0).status_code == 200
        except httpx.HTTPError:
            return False

    poll(served, "the gateway has no bus", DEADLINE_S)
    cluster.note_family()
    assert cluster.end() == 0
    cluster.wait_all_gone()


def test_no_restart_leaves_it_dead(start: Start) -> None:
    cluster = start("--no-restart")
    cluster.wait_ready()
    worker = cluster.find("prefill")
    assert worker is not None
    worker.kill()
    cluster.wait_for("it stays dead")
    assert cluster.find("prefill") is None
    assert cluster.end() == 0


def test_what_stays_dead_is_not_waited_for(start: Start) -> None:
    cluster = start("--no-restart", STANDIN_WAITS="prefill-0")
    cluster.wait_for("decode-0  │ ready")
    worker = cluster.find("decode")
    assert worker is not None
    worker.kill()
    assert cluster.process.wait(DEADLINE_S) == 1
    assert "decode-0 ended before all were ready" in cluster.text()
    assert "Traceback" not in cluster.text()


async def test_its_nats_server_lets_nobody_else_in(start: Start, tmp_path: Path) -> None:
    of_another = {"BATON_NATS_USER": "somebody", "BATON_NATS_TLS_CA": "/there/is/no/such/file"}
    cluster = start("--state-dir", "mine", **of_another)
    cluster.wait_ready()
    file = tmp_path / "mine" / "nats.url"
    assert file.stat().st_mode & 0o777 == 0o600
    url = file.read_text().strip()
    password = url.split(":")[2].split("@")[0]
    assert len(password) >= 32
    bus = await nats.connect(url, "operator")
    await bus.close()
    options = nats.NatsOptions(connect_timeout_s=0.5)
    await refusal("Authorization", lambda: nats.connect(f"nats://{url.split('@')[1]}", "stranger", options))
    assert not [process for process in cluster.family if password in " ".join(process.cmdline())]
    assert cluster.end() == 0
    written = [path for path in (tmp_path / "mine").rglob("*") if path.is_file() and path.suffix != ".ports"]
    holding = {path for path in written if password in path.read_text(errors="replace")}
    assert holding == {file, tmp_path / "mine" / "nats" / "nats-server.conf"}
    assert not [path for path in holding if path.stat().st_mode & 0o077]
    assert password not in cluster.text()


@pytest.mark.parametrize(
    ("flags", "env", "roles"),
    [
        (("--mode", "colocated", "--decode", "2"), {}, ["decode", "decode"]),
        (("--mode", "chunked", "--step-tokens", "96", "--decode", "2"), {}, ["decode", "decode"]),
        ((), {"BATON_MODE": "colocated"}, ["decode"]),
    ],
)
def test_without_prefill_workers(start: Start, flags: tuple[str, ...], env: dict[str, str], roles: list[str]) -> None:
    cluster = start(*flags, **env)
    cluster.wait_ready()
    started = [p.cmdline()[-1] for p in cluster.family if "standin_worker.py" in " ".join(p.cmdline())]
    assert sorted(started) == [*roles, "gateway", "kvstore"]
    mode = env.get("BATON_MODE", flags[1] if flags else "")
    assert f"({mode}, {len(roles)} decode, " in cluster.text()
    assert cluster.end() == 0


def test_two_clusters_side_by_side_but_not_in_one_directory(start: Start, tmp_path: Path) -> None:
    first, second = start("--state-dir", "one"), start("--state-dir", "two")
    first.wait_ready()
    second.wait_ready()
    third = start("--state-dir", "one")
    assert third.process.wait(DEADLINE_S) == 1
    assert f"another cluster (process {first.process.pid}) runs in {tmp_path / 'one'}" in third.text()
    assert first.end() == 0
    assert httpx.get(f"http://127.0.0.1:{second.port}/health", timeout=60.0).status_code == 200
    assert second.end() == 0
    assert (tmp_path / "one" / "logs" / "decode-0.log").read_text().count("stopped in order") == 1


def test_a_taken_port_is_said_at_once(start: Start) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = start("--port", str(port))
        assert cluster.process.wait(DEADLINE_S) == 1
    assert f"port {port} on 127.0.0.1 is in use" in cluster.text()
    assert "--port" in cluster.text()


def test_wrong_settings_start_nothing(start: Start) -> None:
    cluster = start("--set", "decode.page_tokens=0")
    assert cluster.process.wait(DEADLINE_S) == 1
    assert "decode: page_tokens: Input should be greater than or equal to 1" in cluster.text()
    assert "starting" not in cluster.text()


def test_a_worker_that_cannot_start_ends_it_all_with_its_words(start: Start) -> None:
    cluster = start(STANDIN_BREAKS="decode-0")
    assert cluster.process.wait(DEADLINE_S) == 1
    assert "decode-0 does not start (ended with status 3)" in cluster.text()
    assert "    decode-0 cannot do this" in cluster.text()
    assert "Traceback" not in cluster.text()


def test_a_process_gets_its_settings_from_flags_and_environment(start: Start) -> None:
    cluster = start("--set", "decode.threads=7", BATON_PREFILL_THREADS="5", BATON_API_KEYS="alice:sk-s3cret-0123")
    cluster.wait_ready()
    cluster.wait_for("-H 'authorization: Bearer YOUR_KEY'")
    cluster.wait_for("threads=7")
    cluster.wait_for("threads=5")
    assert "s3cret" not in cluster.text()
    lines = cluster.text().splitlines()
    assert any(line.startswith("decode-0") and "threads=7" in line for line in lines)
    assert any(line.startswith("prefill-0") and "threads=5" in line for line in lines)
    assert cluster.end() == 0
