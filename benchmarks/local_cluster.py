"""A cluster for a benchmark: `baton up` as its own process, on free ports and with a state directory of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

REPO = Path(__file__).parents[1]
_START_S = 300.0
_STOP_S = 60.0
_POLL_S = 0.02
_KEPT = ("BATON_CACHE_DIR",)
"""All other settings are the defaults, whatever the shell that runs the benchmark has."""


class LocalCluster:
    """`with LocalCluster("--decode", "2") as cluster:` is ready inside, and gone afterwards. flags: of `baton up`.
    reuse: workers find the state of earlier prompts again; without it a prompt costs the same however often it is
    sent."""

    def __init__(self, *flags: str, reuse: bool = False) -> None:
        self._flags = flags if reuse else (*flags, "--set", "common.prefix_cache=false")
        self._directory = tempfile.TemporaryDirectory(prefix="baton-bench-")
        self._log = Path(self._directory.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.start_s = 0.0
        """From the process's start to the line that says it is ready."""

    def __enter__(self) -> Self:
        argv = [
            sys.executable,
            "-m",
            "services.cli",
            "up",
            "--port",
            "0",
            "--state-dir",
            f"{self._directory.name}/state",
        ]
        env = {key: value for key, value in os.environ.items() if key in _KEPT or not key.startswith("BATON_")}
        env["COLUMNS"] = "400"
        began = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*argv, *self._flags], stdout=log, stderr=subprocess.STDOUT, cwd=REPO, env=env, start_new_session=True
            )
        try:
            self.url = self._wait_ready(began + _START_S).split()[1].removesuffix("/v1")
        except BaseException:
            self._end()
            raise
        self.start_s = time.perf_counter() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def processes(self) -> dict[str, psutil.Process]:
        """By the name `/cluster` has for each; and `nats-server` and `launcher`."""
        assert self._process is not None
        with urllib.request.urlopen(f"{self.url}/cluster", timeout=10.0) as answer:
            workers = json.load(answer)["workers"]
        launcher = psutil.Process(self._process.pid)
        named = {worker["id"]: psutil.Process(worker["pid"]) for worker in workers}
        named |= {child.name(): child for child in launcher.children() if child.name() == "nats-server"}
        return named | {"launcher": launcher}

    def _wait_ready(self, deadline: float) -> str:
        assert self._process is not None
        while time.perf_counter() < deadline:
            lines = self._log.read_text(errors="replace").splitlines()
            ready = next((line for line in lines if line.startswith("Ready  ")), None)
            if ready is not None:
                return ready
            if self._process.poll() is not None:
                raise RuntimeError("`baton up` ended:\n" + "\n".join(lines[-20:]))
            time.sleep(_POLL_S)
        raise RuntimeError(f"not ready after {_START_S:g} s; see what `baton up {' '.join(self._flags)}` says")

    def _end(self) -> None:
        """In order; whatever is left after that is killed."""
        if self._process is not None:
            if self._process.poll() is None:
                family = psutil.Process(self._process.pid).children(recursive=True)
                self._process.send_signal(signal.SIGINT)
                try:
                    self._process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                _, left = psutil.wait_procs(family, timeout=1.0)
                for process in left:
                    process.kill()
            self._process = None
        self._directory.cleanup()
